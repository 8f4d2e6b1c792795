"""The site of the documentation takes its addresses from pyproject.toml."""

from types import SimpleNamespace

from tools import docs_site


def configured(directory, urls):
    (directory / "pyproject.toml").write_text(f'[project]\nname = "django-exactly-once"\n[project.urls]\n{urls}')
    config = SimpleNamespace(config_file_path=str(directory / "mkdocs.yml"), site_url=None, repo_url=None, repo_name=None)
    return docs_site.on_config(config)


def test_site_has_the_addresses_of_the_package_and_none_while_that_has_none(tmp_path):
    config = configured(tmp_path, 'Documentation = "https://docs.example.org/here"\nSource = "https://git.example.org/here"\n')
    empty = configured(tmp_path, "")

    assert config.site_url == "https://docs.example.org/here/"
    assert (config.repo_url, config.repo_name) == ("https://git.example.org/here", "django-exactly-once")
    assert (empty.site_url, empty.repo_url, empty.repo_name) == (None, None, None)
