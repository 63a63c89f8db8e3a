"""The list of models has the names that a session serves, and a client that asks for one finds it."""

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions

from turnwise_gateway.models import Endpoint
from turnwise_gateway.server import GatewayServer, SessionDirectory

ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/v1")
NAMES = ["policy", "judge", "gpt-4o-mini", "org/model", "o1", "o1-pro", "other"]
MODELS = st.dictionaries(
    st.sampled_from(["judge", "gpt-4o-mini", "org/model", "o1", "o1*", "?ther", "*"]),
    st.sampled_from(["policy", "untrained", "refuse", ENDPOINT]),
    max_size=4,
)


def ask_for_models(models):
    """Return the ids of the list, and the status and the id for each name."""
    found = {}

    async def scenario(session):
        directory = SessionDirectory("policy")
        headers = {"Authorization": f"Bearer {directory.add('s-1', session)}"}
        async with GatewayServer(directory) as server, aiohttp.ClientSession(server.url(), headers=headers) as http:
            async with http.get("/s/s-1/v1/models") as response:
                found["list"] = await response.json()
            for name in NAMES:
                async with http.get(f"/s/s-1/v1/models/{name}") as response:
                    body = await response.json()
                    found[name] = (response.status, body.get("id"))

    Sessions().run(scenario, models=models)
    return found


@settings(max_examples=40, deadline=None)
@given(models=MODELS)
def test_a_name_is_shown_where_it_is_served(models):
    """A pattern shows the names that it serves, and is no name itself; refused and unknown names are 404."""

    def use_of(name):
        return models.get(name, next((use for pattern, use in models.items() if matches(pattern, name)), None))

    found = ask_for_models(models)

    for name in NAMES:
        is_served = name == "policy" or use_of(name) not in (None, "refuse")
        assert found[name] == ((200, name) if is_served else (404, None)), (name, models)
    plain = [name for name, use in models.items() if "*" not in name and "?" not in name and use != "refuse"]
    listed = found["list"]
    assert [each["id"] for each in listed["data"]] == ["policy", *plain]
    assert (listed["first_id"], listed["last_id"]) == ("policy", ["policy", *plain][-1])


def matches(pattern, name):
    """Whether a pattern of the strategy fits a name."""
    return {"o1*": name.startswith("o1"), "?ther": name[1:] == "ther", "*": True}.get(pattern, False)
