"""A run with pictures in messages and in a record, and files that are none."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from attrs import evolve
from viewer_runs import build_episode, write_run

from turnwise.media import Picture, picture_part
from turnwise.record.trajectory import Trajectory
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_testing.inputs.vision import make_picture

CAT, DOG = make_picture(40, 30, "red"), make_picture(64, 20, "blue", "JPEG")
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>document.title='owned'</script></svg>"


def fake(data: bytes) -> Picture:
    """Return a picture whose file has other bytes than its type says."""
    return Picture(data=data, media_type="image/png")


def build_pictured(task: int = 0, first: Picture = CAT, second: Picture = DOG):
    """An episode whose user shows a picture between two texts, and whose tool returns another one."""
    prompt = MediaTokens(
        token_ids=np.array([1, 9, 9, 9, 2]), pictures=[PlacedPicture(start=1, num_tokens=3, picture=first)]
    )
    record = Trajectory(prompt)
    record.add_action([5, 6], [-0.5] * 2, weight_version=3)
    seen = MediaTokens(token_ids=np.array([7, 9, 9]), pictures=[PlacedPicture(start=1, num_tokens=2, picture=second)])
    record.add_observation(seen)
    record.add_action([8], [-0.25], weight_version=3)
    question = [{"type": "text", "text": "Before."}, picture_part(first), {"type": "text", "text": "Behind."}]
    episode = build_episode(task, trajectories=(record,))
    messages = list(episode.messages)
    messages[0] = {"role": "user", "content": question}
    messages[2] = {**messages[2], "content": [{"type": "text", "text": "Seen:"}, picture_part(second)]}
    return evolve(episode, messages=tuple(messages), task=evolve(episode.task, messages=tuple(messages[:1])))


def pictured_run(folder: Path, *episodes) -> Path:
    return write_run(folder, episodes or [build_pictured()])


def reference(picture: Picture) -> str:
    return f"media/{picture.file_name}"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
