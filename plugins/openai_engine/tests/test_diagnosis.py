"""The diagnosis of the engine for external servers."""

from turnwise_openai_engine.diagnosis import diagnose


def test_findings(monkeypatch):
    """The engine needs only its HTTP client, and cannot be trained."""
    installed = {found.item: found for found in diagnose()}
    monkeypatch.setattr("turnwise_engine_support.diagnosis.installed_version", lambda *_: ("", ""))
    absent = {found.item: found for found in diagnose()}

    assert ["ok", "ok", "limited", "limited"] == [found.state for found in installed.values()]
    assert ("missing", "pip install turnwise-openai-engine") == (absent["aiohttp"].state, absent["aiohttp"].hint)
