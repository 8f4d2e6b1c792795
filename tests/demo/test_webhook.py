"""The tests of the webhook are in `webhook_behaviour.py`. They need the shop's settings, so they run in their own process."""


def test_the_webhook_tests_pass_under_the_settings_of_the_shop(run_in_the_shop):
    finished = run_in_the_shop(
        "-m", "pytest", "--ds=demo_shop.settings", "--db=sqlite", "tests/demo/webhook_behaviour.py", timeout=100
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout
