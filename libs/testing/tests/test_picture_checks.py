"""The checks of pictures pass on a good engine, and each fails on a broken one."""

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise.types import Picture
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker
from turnwise_testing.engines.bigram import BigramEngine, BigramReference
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.probes.pictures import PictureProbe

VOCAB_SIZE, PLACEHOLDER = 64, 7
PICTURES = tuple(Picture(data=bytes([65 + number] * 8), media_type="image/png") for number in range(3))
COUNTS = (4, 4, 6)
CHECKS = [name for name, check in ENGINE_CHECKS.items() if check.pictures]


def shifted(token_ids, places):
    """Return ids in which each is shifted by the first bytes of the pictures before it."""
    shift = np.zeros(len(token_ids) + 1, np.int64)
    for place in places:
        shift[place.stop :] += place.picture.data[0]
    return ((np.array(token_ids) + shift[: len(token_ids)]) % VOCAB_SIZE).tolist()


class PictureReference(BigramReference):
    """A bigram model whose every transition depends on the pictures before it."""

    def scores(self, token_ids, num_context, *, temperature, variant, pictures=()):
        logprobs = []
        best = []
        for index in range(num_context, len(token_ids)):
            (last,) = shifted(token_ids[:index], pictures)[-1:]
            chosen, top = super().scores([last, token_ids[index]], 1, temperature=temperature, variant=variant)
            logprobs += chosen.tolist()
            best += top.tolist()
        return np.array(logprobs, np.float32), np.array(best, np.float32)


REFERENCE = PictureReference(VOCAB_SIZE)
PROBE = EngineProbe(
    vocab_size=VOCAB_SIZE,
    reference=REFERENCE,
    pictures=PictureProbe(pictures=PICTURES, num_tokens=COUNTS, placeholder=PLACEHOLDER, reference=REFERENCE),
)


class PictureEngine(BigramEngine):
    """Continues from a last id that its pictures shift."""

    @property
    def capabilities(self):
        return evolve(super().capabilities, pictures=True)

    async def generate(self, request):
        for place in request.pictures:
            self.check(request, place)
        pictures = self.seen(request)
        shift = sum(place.picture.data[0] for place in pictures)
        ids = request.token_ids.tolist()
        result_ids, logprobs, version = [], [], 0
        for number in range(request.sampling.max_tokens or 1):
            last = (ids[-1] + shift) % VOCAB_SIZE
            sampling = request.sampling.with_(max_tokens=1, seed=(request.sampling.seed or 0) + 100 * number)
            one = evolve(request, token_ids=np.array([last]), sampling=sampling, pictures=())
            result = await super().generate(one)
            result_ids += result.token_ids.tolist()
            logprobs += result.logprobs.tolist()
            ids += result.token_ids.tolist()
            version = result.weight_version
        return evolve(result, token_ids=result_ids, logprobs=logprobs, weight_version=np.max(version).item())

    def seen(self, request):
        return request.pictures

    def check(self, request, place):
        if place.picture not in PICTURES:
            raise EngineError(f"the picture {place.picture.key[:12]} is broken")
        expected = COUNTS[PICTURES.index(place.picture)]
        if place.num_tokens != expected or (request.token_ids[place.start : place.stop] != PLACEHOLDER).any():
            raise EngineError(f"the picture {place.picture.key[:12]} needs {expected} placeholders")


class Blind(PictureEngine):
    """Sees no picture."""

    def seen(self, request):
        return ()


class FirstOnly(PictureEngine):
    """Sees the first picture of a context only, as an engine that reads pictures in the first turn."""

    def seen(self, request):
        return request.pictures[:1]


class SharedCache(PictureEngine):
    """Looks its cache up by ids."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def seen(self, request):
        return self.cache.setdefault(request.token_ids.tobytes(), request.pictures)


class Careless(PictureEngine):
    """Accepts any placeholders, and takes broken pictures for good ones."""

    def check(self, request, place):
        pass


class OldTower(PictureEngine):
    """Goes on with the features of the old weights after an update, here as another picture."""

    def seen(self, request):
        return request.pictures if self._version != 1 else (*request.pictures, *request.pictures)


BROKEN = (
    (Blind, "picture_logprobs_are_those_of_the_model", "off by"),
    (SharedCache, "same_ids_with_another_picture", "off by"),
    (FirstOnly, "pictures_in_later_turns", "off by"),
    (OldTower, "pictures_after_an_update", "off by"),
    (Careless, "wrong_placeholders_are_refused", "expected an EngineError"),
    (Careless, "broken_picture_is_refused", "expected an EngineError"),
)


@pytest.mark.parametrize("name", CHECKS)
def test_a_good_engine_passes(name):
    """Each check passes on an engine that sees its pictures."""
    with EngineChecker(PictureEngine, PROBE) as checker:
        assert checker.run(name) == ""


@pytest.mark.parametrize(("kind", "name", "message"), BROKEN, ids=[each[1] for each in BROKEN])
def test_a_broken_engine_is_caught(kind, name, message):
    """The check that is about the broken promise fails."""
    with EngineChecker(kind, PROBE) as checker, pytest.raises(AssertionError, match=message):
        checker.run(name)


def test_every_check_has_a_broken_engine():
    """No check passes on everything."""
    assert {name for _kind, name, _message in BROKEN} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_an_engine_without_pictures_says_so(name):
    """The checks do not apply to it, and neither to a probe without pictures."""
    with EngineChecker(BigramEngine, PROBE) as checker:
        assert checker.run(name) == "the engine has no capability 'pictures'"
    with EngineChecker(PictureEngine, evolve(PROBE, pictures=None)) as checker:
        assert checker.run(name) == "the probe has no pictures"


def test_a_probe_needs_two_pictures_of_one_size():
    """Else the check of the prefix cache would check nothing."""
    with pytest.raises(ValueError, match="equally many"):
        PictureProbe(pictures=PICTURES, num_tokens=(4, 5, 6), placeholder=PLACEHOLDER, reference=REFERENCE)
