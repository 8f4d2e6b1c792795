"""What the webhook does is in `webhook_behaviour.py`; it needs the shop's settings, so it runs in its own process."""


def test_the_webhook_behaves(run_in_the_shop):
    finished = run_in_the_shop(
        "-m", "pytest", "--ds=demo_shop.settings", "--db=sqlite", "tests/demo/webhook_behaviour.py", timeout=100
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout
