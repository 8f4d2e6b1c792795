"""The Lua scripts of the Redis lease store: each is one atomic operation, with the time of Redis's clock.

Keys: 1 the state of Redis itself, 2 the record of one message, 3 the counts. The first three arguments of every script are the
incarnation that the caller knows, and the last report that it received: a server, and that server's number of writes. Every
script returns a report for the next call, with the time of Redis.

Redis stores its `incarnation`, the number of `writes`, the current `server` process, and the history of `servers`: for each its
run id, and the number of writes when it took over. An emptied Redis has another incarnation or none. A Redis restored from an
older state, by a restart or the promotion of a replica, had fewer writes when it took over than the caller's report contains,
even if it has more now. In both cases every script answers "lost" and does nothing but give a restored Redis a new incarnation,
so that all processes detect the loss.

A record's fields: `state` (running, free, consumed), `owner`, `fence`, `until` (milliseconds), `attempts`, `digest` and
`message` (short hashes of body and message id), `row` (1: the message has a row in the database, which decides from then on),
`under` (the incarnation of its last run), `stopping` (1: its process has been asked to stop), `step:…`.
"""

_READ_META = """
local meta = redis.call('HMGET', KEYS[1], 'incarnation', 'writes', 'server', 'servers')
local writes, server, servers = tonumber(meta[2] or 0), meta[3] or '', meta[4] or ''
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
if meta[1] and run and string.sub(run, 1, 12) ~= string.sub(server, 1, 12) then
  server = string.sub(run, 1, 12) .. ':' .. writes
  servers = string.sub(servers, -1000) .. server .. ' '
  redis.call('HSET', KEYS[1], 'server', server, 'servers', servers)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function report() return {server, writes, now} end
local function has_all(server_before, count)
  if count == 0 then return true end
  if writes < count then return false end
  if server_before == server then return true end
  local _, last = string.find(servers, server_before .. ' ', 1, true)
  if not last then return false end
  for had in string.gmatch(string.sub(servers, last), ' %w+:(%d+)') do
    if tonumber(had) < count then return false end
  end
  return true
end
"""
"""`has_all`: does this Redis have all data that `server_before` had after `count` writes?

Without permission for INFO, a change of server is not detected. Then only a count that is too low shows a loss.
"""

_OPEN = (
    _READ_META
    + """
if meta[1] ~= ARGV[1] then return {'lost', {'', 0}} end
if not has_all(ARGV[2], tonumber(ARGV[3])) then
  redis.call('HSET', KEYS[1], 'incarnation', redis.sha1hex(ARGV[1] .. now))
  return {'lost', {'', 0}}
end
local function written()
  writes = redis.call('HINCRBY', KEYS[1], 'writes', 1)
  return report()
end
local function instant(milliseconds) return string.format('%.0f', milliseconds) end
"""
)

_OURS = (
    _OPEN
    + """
local owner, fence, keep = ARGV[4], ARGV[5], ARGV[6]
local found = redis.call('HMGET', KEYS[2], 'state', 'owner', 'fence', 'until', 'row', 'digest', 'message', 'attempts')
local state, row = found[1], found[5] or '0'
local same = found[3] == fence
local last = state == 'running' and same and found[2] == owner
local ours = last and tonumber(found[4]) > now
"""
)

ACQUIRE = (
    _OPEN
    + """
local owner, duration, keep = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local stored, attempt, fence_before, doubtful = ARGV[7] == '1', tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1'
local digest, message, handler, cause = ARGV[11], ARGV[12], ARGV[13], ARGV[14]
if now > tonumber(ARGV[15]) then return {'late', report()} end
local under = string.sub(ARGV[1], 1, 8)
local found = redis.call('HMGET', KEYS[2], 'state', 'owner', 'fence', 'until', 'attempts', 'row', 'digest', 'message', 'under',
  'stopping')
local state, row = found[1], found[6] or '0'
local differs = (state and found[7] ~= digest) and 1 or 0
local same = (found[8] == message and (message ~= '' or cause == 'redelivery')) and 1 or 0
if state == 'consumed' then
  if not stored then
    redis.call('HINCRBY', KEYS[3], 'duplicates:' .. handler, 1)
    redis.call('HINCRBY', KEYS[3], (same == 1 and cause or 'business') .. ':' .. handler, 1)
    if differs == 1 then redis.call('HINCRBY', KEYS[3], 'conflicts:' .. handler, 1) end
  end
  return {'consumed', written(), same, differs}
end
local running = state == 'running' and tonumber(found[4]) > now
local mine = running and found[2] == owner
if running and not mine then
  redis.call('HSET', KEYS[2], 'row', 1)
  return {'held', written(), same, differs, instant(tonumber(found[4]) - now), found[5], found[10]}
end
if state and not stored and row == '1' then return {'row decides', report()} end
if doubtful and (not state or found[9] ~= under) then return {'history lost', report()} end
local fence, attempts = tonumber(found[3] or 0), tonumber(found[5] or 0)
-- The claim of its row has incremented the row's fence, also if this lease was granted before.
fence = math.max(mine and fence or fence + 1, fence_before + 1)
if not mine then
  attempts = stored and attempt or attempts + 1
end
redis.call('HSET', KEYS[2], 'state', 'running', 'owner', owner, 'fence', fence, 'until', instant(now + duration),
  'attempts', attempts, 'row', stored and 1 or row, 'digest', digest, 'message', message, 'under', under, 'stopping', 0)
redis.call('PEXPIRE', KEYS[2], keep)
return {'lease', written(), fence, attempts, state and redis.call('HGETALL', KEYS[2]) or {}}
"""
)

EXTEND = (
    _OURS
    + """
if last and not ours and ARGV[9] == '0' then return {'ended', report()} end
if not last then return {'refused', report()} end
redis.call('HSET', KEYS[2], 'until', instant(now + tonumber(ARGV[7])), 'stopping', ARGV[8])
redis.call('PEXPIRE', KEYS[2], keep)
return {'done', written()}
"""
)

REMEMBER = (
    _OURS
    + """
if not ours then return {'refused', report()} end
redis.call('HSET', KEYS[2], 'step:' .. ARGV[7], ARGV[8])
return {'done', written()}
"""
)

CONSUME = (
    _OURS
    + """
if state == 'consumed' and same then return {'done', report(), row} end
if not ours then return {'refused', report()} end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'state', 'consumed', 'fence', fence, 'row', row, 'digest', found[6], 'message', found[7])
redis.call('PEXPIRE', KEYS[2], keep)
if row == '0' then redis.call('HINCRBY', KEYS[3], 'handled:' .. ARGV[7], 1) end
return {'done', written(), row}
"""
)

FREE = (
    _OURS
    + """
if state == 'free' and same then return {'done', report()} end
if not ours then return {'refused', report()} end
redis.call('HDEL', KEYS[2], 'owner', 'until')
redis.call('HSET', KEYS[2], 'state', 'free', 'row', 1, 'attempts', ARGV[7])
redis.call('PEXPIRE', KEYS[2], keep)
return {'done', written()}
"""
)

FORGET = (
    _OURS
    + """
if state == 'consumed' or not same then return {'refused', report()} end
if redis.call('HGET', KEYS[2], 'step:' .. ARGV[7]) == '' then redis.call('HDEL', KEYS[2], 'step:' .. ARGV[7]) end
return {'done', written()}
"""
)

HELD = (
    _OPEN
    + """
local found = redis.call('HMGET', KEYS[2], 'state', 'until')
if not found[1] then return {'free', report()} end
redis.call('HSET', KEYS[2], 'row', 1)
return {found[1] == 'running' and tonumber(found[2]) > now and 'held' or 'free', written()}
"""
)

READ_INCARNATION = (
    """
redis.call('HSETNX', KEYS[1], 'incarnation', ARGV[1])
"""
    + _READ_META
    + """
return {meta[1], report()}
"""
)
"""The incarnation of Redis; ARGV[1] becomes the incarnation if there is none."""
