"""The harness itself: what it says when an environment is missing or stale, and what it ends."""

import shutil
import sys

import harness
import pytest


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A clone with no environments and one requirement file."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/peer.txt").write_text("torch==1\n")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "HERE", tmp_path)
    return tmp_path


def make(root, requirements: str):
    folder = root / ".venv-peers/peer"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "bin/sleep").symlink_to(shutil.which("sleep"))
    (folder / ".ready").write_text(f"{root}\n{requirements}")
    return folder


def test_a_missing_environment_is_an_error_that_names_the_command(root):
    with pytest.raises(RuntimeError, match="make setup-peers"):
        harness.environment("peer")


def test_a_stale_environment_is_an_error(root):
    folder = make(root, "torch==0\n")
    with pytest.raises(RuntimeError, match=r"another peer\.txt.*make setup-peers"):
        harness.environment("peer")
    (folder / ".ready").write_text(f"{root}\ntorch==1\n")
    assert harness.environment("peer") == folder


def test_a_script_that_fails_shows_why(root, tmp_path):
    make(root, "torch==1\n")
    (root / "scripts").mkdir()
    (root / "scripts/broken.py").write_text("raise SystemExit('the reason')\n")
    with pytest.raises(AssertionError, match="the reason"):
        harness.ask("peer", "broken", tmp_path / "folder", {})


def test_a_server_that_ends_at_once_is_an_error(root, tmp_path):
    make(root, "torch==1\n")
    with (
        pytest.raises(AssertionError, match="ended"),
        harness.server("peer", ["sleep"], tmp_path / "log"),  # --host is no time interval
    ):
        pass
