"""Pictures in the token record: places as properties of cuts, branches and copies, and refusals."""

import pickle

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.episode.records import EpisodeRecords
from turnwise.episode.setup import Limits, apply_prompt_policy
from turnwise.errors import BudgetExhausted, ConfigError, DataError, InvariantError, TrajectoryError
from turnwise.media import find_picture, picture_part, read_picture, read_picture_part
from turnwise.options import PromptPolicy
from turnwise.record.invariants import check_lineage, check_trajectory
from turnwise.record.lineage import RecordLineage
from turnwise.record.pictures import places, take_pictures
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Mark, Trajectory
from turnwise.runtime.remote.result_wire import pack_episodes, unpack_episodes
from turnwise.types import Capabilities, MediaTokens, PlacedPicture, Status, Task
from turnwise_testing.inputs.strategies import Script, picture_scripts

CAT = find_picture(b"\x89PNG\r\n\x1a\n cat", "image/png")
DOG = find_picture(b"\xff\xd8\xff dog", "image/jpeg")


def media(num_tokens: int, *spans: tuple[int, int]) -> MediaTokens:
    """Return ids from 0 with a cat in each span."""
    placed = [PlacedPicture(start=start, num_tokens=stop - start, picture=CAT) for start, stop in spans]
    return MediaTokens(token_ids=np.arange(num_tokens), pictures=placed)


def seen(trajectory: Trajectory) -> list[tuple[str, list[int]]]:
    """Return the key and the placeholder ids of each picture."""
    return [(p.picture.key, trajectory.input_ids[p.start : p.stop].tolist()) for p in trajectory.pictures]


class TestPlaces:
    """The places of pictures."""

    def test_prompt_observations_and_paths(self):
        """
        Places count from the start of the record, also in a path and after its join.
        """
        record = Trajectory(media(5, (1, 3)))
        record.add_action([7, 7], [-0.5, -0.5])
        record.add_observation(media(4, (0, 2), (2, 4)))
        assert [(p.start, p.num_tokens) for p in record.pictures] == [(1, 2), (7, 2), (9, 2)]
        first, second = record.fork(2)
        first.add_observation(media(3, (1, 2)))
        second.add_action([8], [-0.5])
        assert [p.start for p in first.pictures] == [1, 7, 9, 12]
        assert [p.start for p in second.pictures] == [1, 7, 9]
        record.join((first, second))
        assert [p.start for p in record.pictures] == [1, 7, 9, 12]
        check_trajectory(record)
        assert record.response_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]

    @given(picture_scripts())
    def test_invariants(self, script: Script):
        """
        Each picture lies whole in the prompt or in one observation, and masks are 0 on all placeholders.
        """
        record = script.build()
        check_trajectory(record)
        mask = np.concatenate([np.zeros(record.num_prompt_tokens, np.uint8), record.response_mask])
        assert not any(mask[p.start : p.stop].any() for p in record.pictures)

    @given(picture_scripts(), st.integers(0, 40))
    def test_truncation_keeps_pictures_whole(self, script: Script, budget: int):
        """
        A shorter record has the first pictures, whole, and loses no more tokens than those of a picture.
        """
        record = script.build()
        cut = record.truncated(budget)
        check_trajectory(cut)
        assert seen(cut) == seen(record)[: len(cut.pictures)]
        wanted = min(len(record), record.num_prompt_tokens + budget)
        divided = [p for p in record.pictures if p.start < wanted < p.stop]
        assert len(cut) == (divided[0].start if divided else wanted)

    @given(picture_scripts(with_blocks=False), st.data())
    def test_branches_share_pictures(self, script: Script, data: st.DataObject):
        """
        A branch at any mark that the record had has the pictures up to there.
        """
        num_steps = data.draw(st.integers(0, len(script.steps)))
        mark, record = script.build(num_steps).mark(), script.build()
        branch = record.branched(mark)
        check_trajectory(branch)
        assert seen(branch) == seen(script.build(num_steps))
        check_lineage([record, branch], [RecordLineage(), RecordLineage(parent=0, num_shared_tokens=mark.num_tokens)])

    @given(picture_scripts(), st.data())
    def test_restored_records_are_equal(self, script: Script, data: st.DataObject):
        """
        A record that was rewound, saved or pickled has the same pictures, and holds the same bytes.
        """
        num_steps = data.draw(st.integers(0, len(script.steps)))
        mark, record = script.build(num_steps).mark(), script.build()
        assert places(record.rewound(mark).pictures) == places(script.build(num_steps).pictures)
        for copy in (pickle.loads(pickle.dumps(record)), Trajectory.from_dict(record.to_dict())):
            assert places(copy.pictures) == places(record.pictures)
            assert all(a.picture is b.picture for a, b in zip(copy.pictures, record.pictures, strict=True))

    @given(picture_scripts(), st.integers(1, 12), st.sampled_from(["truncate_left", "truncate_right"]))
    def test_prompt_policy_keeps_pictures_whole(self, script: Script, limit: int, policy: PromptPolicy):
        """
        A prompt that is cut at either end has whole pictures only.
        """
        prompt = Trajectory(script.build(0).prompt_ids) if not script.pictures else script.build(0)
        given_ids = MediaTokens(token_ids=prompt.input_ids, pictures=prompt.pictures)
        task = Task(messages=({"role": "user", "content": ""},), uid="t")
        limits = Limits(prompt_length=limit, prompt_policy=policy)
        kept = apply_prompt_policy(given_ids, task, limits)
        assert isinstance(kept, MediaTokens)
        assert len(kept) <= limit
        record = Trajectory(kept)
        whole = seen(prompt)
        found = seen(record)
        assert found == (whole[len(whole) - len(found) :] if policy == "truncate_left" else whole[: len(found)])

    def test_open_path_is_restored(self):
        """
        A record with an open block keeps the pictures of its paths.
        """
        record = Trajectory([1])
        (path,) = record.fork(1)
        path.add_observation(media(3, (1, 3)))
        (copy,) = Trajectory.from_dict(record.to_dict()).open_paths
        assert [(p.start, p.picture) for p in copy.pictures] == [(2, CAT)]

    def test_results_carry_pictures_to_the_driver(self):
        """
        The wire of results keeps places and pictures.
        """
        record = Trajectory(media(5, (1, 3)))
        task = Task(messages=({"role": "user", "content": ""},), uid="t")
        result = EpisodeResult(task=task, status=Status.COMPLETED, trajectories=(record,))
        message = pickle.loads(pickle.dumps(pack_episodes([(0, result)])))
        [(_, copy)] = unpack_episodes(message)
        assert copy.trajectories[0].pictures[0].picture is CAT


class TestRefusals:
    """Marks, records and engines that do not fit."""

    def test_mark_inside_a_picture(self):
        """
        A record does not branch and does not go back to the middle of a picture.
        """
        record = Trajectory([1])
        record.add_observation(media(4, (1, 4)))
        for cut in (record.branched, record.rewound):
            with pytest.raises(TrajectoryError, match="a mark at token 3 divides the picture of tokens 2:5"):
                cut(Mark(3))

    def test_picture_over_sampled_tokens(self):
        """
        The check of a record finds a picture on tokens that the policy sampled.
        """
        record = Trajectory([1])
        record.add_action([1, 2], [-0.5, -0.5])
        record._pictures = media(3, (1, 2)).pictures
        with pytest.raises(InvariantError, match="the picture of tokens 1:2 is not whole in one observation"):
            check_trajectory(record)

    def test_branch_with_other_pictures(self):
        """
        The check of a branch compares pictures.
        """
        record = Trajectory(media(3, (0, 2)))
        other = Trajectory(evolve(media(3), pictures=(PlacedPicture(start=0, num_tokens=2, picture=DOG),)))
        with pytest.raises(InvariantError, match="record 1 does not replay"):
            check_lineage([record, other], [RecordLineage(), RecordLineage(parent=0, num_shared_tokens=3)])

    def test_saved_pictures_behind_the_end(self):
        """
        Saved pictures must fit the saved tokens.
        """
        saved = Trajectory(media(3, (0, 2))).to_dict()
        saved["pictures"] = media(9, (4, 9)).pictures
        with pytest.raises(TrajectoryError, match="do not fit it: the picture of tokens 4 to 9"):
            Trajectory.from_dict(saved)

    def test_engine_without_pictures(self):
        """
        A request with pictures needs an engine that takes them.
        """
        record = Trajectory(media(3, (0, 2)))
        with pytest.raises(ConfigError, match="need an engine with the capability pictures"):
            take_pictures(record, Capabilities())
        assert take_pictures(record, Capabilities(pictures=True)) == record.pictures
        assert take_pictures(Trajectory([1]), Capabilities()) == ()


class TestParts:
    """Pictures as parts of messages."""

    def test_round_trip(self):
        """
        A part gives back the bytes, and the process holds these once.
        """
        assert read_picture_part(picture_part(CAT)) is CAT
        assert read_picture_part({"type": "image_url", "image_url": picture_part(DOG)["image_url"]["url"]}) is DOG
        assert CAT.file_name == f"{CAT.key}.png"

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("https://example.com/cat.png", "only data: URLs in base64 are taken, none is fetched"),
            ("file:///etc/passwd", "only data: URLs"),
            ("data:image/png,abc", "only data: URLs"),
            ("data:image/png;base64,????", "is no base64"),
            ("data:image/png;base64,", "is empty"),
            ("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "is of no known type"),
        ],
    )
    def test_refused_urls(self, url: str, reason: str):
        """
        Nothing is fetched, and broken data have one clear line.
        """
        with pytest.raises(DataError, match=reason):
            read_picture_part({"type": "image_url", "image_url": {"url": url}})

    def test_large_pictures(self, monkeypatch: pytest.MonkeyPatch):
        """
        A limit of bytes holds before and after the text is decoded.
        """
        monkeypatch.setattr("turnwise.media.MAX_PICTURE_BYTES", 8)
        with pytest.raises(DataError, match="more than 8 bytes"):
            read_picture_part(picture_part(CAT))
        with pytest.raises(DataError, match=r"cat\.png has 12 bytes, more than 8"):
            read_picture(CAT.data, "cat.png")

    def test_part_without_a_url(self):
        """
        A part in another form is refused.
        """
        with pytest.raises(DataError, match="needs the form"):
            read_picture_part({"type": "image", "path": "cat.png"})


def test_episodes_count_the_pictures_of_a_record():
    """A prompt with too many is the data set's fault; an observation with too many ends the episode."""
    records = EpisodeRecords(Limits(max_pictures=2))
    with pytest.raises(DataError, match=r"the prompt has 3 pictures, more than rollout\.max_pictures=2"):
        records.open(Trajectory(media(6, (0, 2), (2, 4), (4, 6))), "")
    record = records.open(Trajectory(media(4, (0, 2), (2, 4))), "")
    records.check_room(record, "observation", np.arange(3))
    with pytest.raises(BudgetExhausted, match="would give the record 3 pictures, more than 2") as caught:
        records.check_room(record, "observation", media(3, (0, 2)))
    assert (caught.value.limit, caught.value.value) == ("rollout.max_pictures", 2)
