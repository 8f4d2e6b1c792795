"""A private RabbitMQ node, with an epmd, a cookie and a home of its own.

Its name ends in `@localhost`, so that it runs on a machine that cannot resolve its own host name. Virtual hosts are
cheap: one for every test. They are made through a small Erlang node that stays connected, in milliseconds;
`rabbitmqctl`, which takes half a second to start, is there for everything else.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import ClassVar

import amqp

from tests.support.servers import binaries, watcher
from tests.support.servers.private import LOOPBACK, PrivateServer, ServerFailed, forget, free_port, spawn

NODE = "rabbit@localhost"
USER = "guest"

# Evaluates on the broker's node one Erlang expression a line and prints its value on one line.
CONSOLE = """
Loop = fun(Again) ->
    case io:get_line("") of
        eof -> halt(0);
        Line ->
            Answer = try
                {ok, Tokens, _} = erl_scan:string(Line),
                {ok, Expressions} = erl_parse:parse_exprs(Tokens),
                case rpc:call('%s', erl_eval, exprs, [Expressions, []], 60000) of
                    {value, Value, _} -> {ok, Value};
                    Refusal -> {error, Refusal}
                end
            catch Class:Reason -> {error, {Class, Reason}} end,
            io:format("~0tp~n", [Answer]),
            Again(Again)
    end
end,
Loop(Loop).
"""

# Quorum queues publish their counters every few seconds only: ask the leader.
QUEUE_LENGTHS = """
[begin
    {resource, _, queue, Name} = amqqueue:get_name(Queue),
    Info = fun() -> proplists:get_value(messages, rabbit_amqqueue:info(Queue, [messages])) end,
    Length = case amqqueue:get_type(Queue) of
        rabbit_quorum_queue ->
            case ra:leader_query(amqqueue:get_pid(Queue), {rabbit_fifo, query_messages_total, []}) of
                {ok, {_, Total}, _} -> Total;
                _ -> Info()
            end;
        _ -> Info()
    end,
    {base64:encode(Name), Length}
end || Queue <- rabbit_amqqueue:list(%s)].
"""


class RabbitServer(PrivateServer):
    name: ClassVar[str] = "RabbitMQ"

    def __init__(self, *, spins: bool = True, plugins: Sequence[str] = (), **settings: str) -> None:
        """`settings` are lines of rabbitmq.conf, beside ours; `__` stands for the dot in a key.

        By default Erlang's schedulers spin a little before they sleep, which reduces latency. Where many nodes share few
        processors, the spinning costs the others time.
        """
        super().__init__()
        self._spins = spins
        self._plugins = ["rabbitmq_consistent_hash_exchange", *plugins]
        self._settings = {key.replace("__", "."): value for key, value in settings.items()}
        self._epmd_port = free_port()
        self._distribution_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None
        self._console: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        return f"amqp://{USER}:{USER}@{LOOPBACK}:{self.port}/{vhost}"

    def new_vhost(self) -> str:
        """The URL of a fresh virtual host: no queue, no exchange but the built-in ones, no connection."""
        name = f"test-{secrets.token_hex(6)}"
        self.create_vhost(name)
        return self.url_of(name)

    def create_vhost(self, name: str) -> None:
        vhost, user = _binary(name), _binary(USER)
        self.evaluate(f"rabbit_vhost:add({vhost}, {user}).")
        everything = ", ".join(['<<".*">>'] * 3)
        self.evaluate(f"rabbit_auth_backend_internal:set_permissions({user}, {vhost}, {everything}, {user}).")

    def delete_vhost(self, name: str) -> None:
        """Remove a virtual host (its name, or its URL) with its queues, and disconnect its clients."""
        self.evaluate(f"rabbit_vhost:delete({_binary(_name(name))}, {_binary(USER)}).")

    def queue_lengths(self, vhost: str = "/") -> dict[str, int]:
        """Messages each queue of a virtual host (its name, or its URL) holds, delivered and not yet acked ones too."""
        name = vhost if vhost == "/" or "/" not in vhost else vhost.rpartition("/")[2] or "/"
        answer = self.evaluate(QUEUE_LENGTHS % _binary(name))
        return {_decoded(encoded): int(length) for encoded, length in re.findall(r'\{<<"([^"]*)">>,(\d+)\}', answer)}

    def routing_keys(self, url: str) -> list[str]:
        """Those of the bindings of a virtual host, given by its URL."""
        answer = self.evaluate(
            f"[base64:encode(Key) || {{binding, _, Key, _, _}} <- rabbit_binding:list({_binary(_name(url))})]."
        )
        return [_decoded(encoded) for encoded in re.findall(r'<<"([^"]*)">>', answer)]

    def connections(self, url: str) -> int:
        """How many connections a virtual host has."""
        return self.evaluate("rabbit_networking:connection_info_all([vhost]).").count(f'<<"{_name(url)}">>')

    def channels(self, url: str) -> int:
        """How many channels a virtual host has."""
        return self.evaluate("rabbit_channel:info_all([vhost]).").count(f'<<"{_name(url)}">>')

    def set_policy(self, url: str, definition: Mapping[str, int], *, name: str = "limit", by_operator: bool = False) -> None:
        """Set a policy for all queues of a virtual host."""
        function = "parse_set_op" if by_operator else "parse_set"
        texts = ", ".join(map(_binary, (name, ".*", json.dumps(dict(definition)))))
        self.evaluate(f'ok = rabbit_policy:{function}({_binary(_name(url))}, {texts}, 0, <<"queues">>, {_binary(USER)}).')

    def clear_policy(self, url: str, *, name: str = "limit", by_operator: bool = False) -> None:
        function = "delete_op" if by_operator else "delete"
        self.evaluate(f"ok = rabbit_policy:{function}({_binary(_name(url))}, {_binary(name)}, {_binary(USER)}).")

    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl` prints. Half a second of processor time each: `evaluate` is the fast way."""
        return self._run([str(self._tools.ctl), "--node", NODE, *arguments], env=self._environment())

    def evaluate(self, expression: str) -> str:
        """The value of an Erlang expression (with its full stop), evaluated inside the broker."""
        if not self.is_running:
            raise ServerFailed("RabbitMQ is not running")
        console = self._connected_console()
        assert console.stdin is not None
        assert console.stdout is not None
        console.stdin.write(" ".join(expression.split()).encode() + b"\n")
        console.stdin.flush()
        answer = console.stdout.readline().decode().strip()
        if not answer.startswith("{ok,"):
            raise ServerFailed(f"{expression.strip()} answered {answer or 'nothing'}\n--- log\n{self.log_tail()}")
        return answer.removeprefix("{ok,").removesuffix("}")

    def stop(self) -> None:
        self._end_console()
        super().stop()
        if self._epmd is not None:
            watcher.kill_tree(self._epmd.pid)
            self._epmd.wait()
            forget(self._epmd)
            self._epmd = None

    def kill(self) -> None:
        # RabbitMQ answers a declaration before Mnesia's log of it is in the file: a queue or binding declared a moment before
        # a kill would be lost with some of the kills.
        with contextlib.suppress(ServerFailed):  # one that never started has no log
            self.evaluate("mnesia:sync_log().")
        self._end_console()
        super().kill()

    def lose_the_disk(self) -> None:
        """Kill the broker, remove its data, and start it again with nothing but its default user and virtual host."""
        self.kill()
        shutil.rmtree(self.directory / "data")
        self.start()

    def _prepare(self) -> None:
        self._tools = binaries.rabbitmq()
        self._home = self.directory / "home"
        self._home.mkdir()
        cookie = self._home / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        configuration = {
            "listeners.tcp.1": f"{LOOPBACK}:{self.port}",
            "disk_free_limit.absolute": "50MB",
            "default_user": USER,
            "default_pass": USER,
            "max_message_size": "134217728",  # the default before version 4
            **self._settings,
        }
        lines = [f"{key} = {value}\n" for key, value in configuration.items()]
        (self.directory / "rabbitmq.conf").write_text("".join(lines))
        (self.directory / "rabbitmq-env.conf").touch()
        (self.directory / "advanced.config").write_text("[].\n")
        (self.directory / "enabled_plugins").write_text(f"[{', '.join(self._plugins)}].\n")

    def _launch(self) -> subprocess.Popen[bytes]:
        if self._epmd is None or self._epmd.poll() is not None:
            address = ["-address", LOOPBACK, "-port", str(self._epmd_port)]
            self._epmd = self._spawn([str(self._tools.epmd), *address], env=self._environment())
        return self._spawn([str(self._tools.server)], env=self._environment())

    def _answers(self) -> bool:
        with amqp.Connection(f"{LOOPBACK}:{self.port}", userid=USER, password=USER, connect_timeout=5):
            return True

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.pathsep.join([str(self._tools.erl.parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self._home),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "" if self._spins else "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, instead of staying as its parent
            "RABBITMQ_NODENAME": NODE,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.directory / "generated"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_LOGS": str(self.log),
            "RABBITMQ_PID_FILE": str(self.directory / "rabbitmq.pid"),
        }

    def _connected_console(self) -> subprocess.Popen[bytes]:
        if self._console is None or self._console.poll() is not None:
            name = f"console-{secrets.token_hex(4)}@localhost"
            command = [str(self._tools.erl), "-noshell", "-hidden", "-sname", name, "-eval", CONSOLE % NODE]
            with self.log.open("ab") as log:
                self._console = spawn(command, self.account, self.directory, log, self._environment(), talks=True)
        return self._console

    def _end_console(self) -> None:
        if self._console is not None:
            watcher.kill_tree(self._console.pid)
            self._console.communicate()
            forget(self._console)
            self._console = None


def _binary(text: str) -> str:
    return '<<"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"/utf8>>'


def _name(url: str) -> str:
    """The virtual host of a URL."""
    return url.rpartition("/")[2]


def _decoded(encoded: str) -> str:
    return base64.b64decode(encoded).decode()
