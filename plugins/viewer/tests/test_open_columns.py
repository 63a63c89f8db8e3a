"""The viewer shows the columns of plugins that it does not know."""

from picture_runs import CAT, DOG, build_pictured, reference

from turnwise import ColumnSpec
from turnwise_result_files.episode_rows import rows_of
from turnwise_result_files.media import MediaFolder
from turnwise_testing.inputs.small_episodes import episode, trajectory
from turnwise_viewer.episode_record import describe_tokens


def test_each_token_has_its_value_as_text(tmp_path):
    """A token without one has null, and so have the tokens of a prompt in a column of responses."""
    rank = ColumnSpec(name="rank", dtype="int32", fill=-1)
    routes = ColumnSpec(name="routes", dtype="int16", shape=(2,), fill=-1, tokens="all")
    record = trajectory().with_column(rank, [2, 1, -1, 0])
    record = record.with_column(routes, [[-1, -1], *([index, 7] for index in range(5))])
    (row,) = rows_of(episode(record), None, MediaFolder(tmp_path))
    shown = describe_tokens(row, None)["open_columns"]
    assert {
        "rank": [None, None, "2", "1", None, "0"],
        "routes": [None, "[0, 7]", "[1, 7]", "[2, 7]", "[3, 7]", "[4, 7]"],
    } == shown
    (plain,) = rows_of(episode(trajectory()), None, MediaFolder(tmp_path))
    assert {} == describe_tokens(plain, None)["open_columns"]


def test_a_column_may_have_the_name_of_the_pictures(tmp_path):
    """The files of the pictures then have another one."""
    pictured = build_pictured()
    (record,) = pictured.trajectories
    record = record.with_column(ColumnSpec(name="picture", dtype="int32", fill=-1), [2, 1, -1, -1, -1, 0])
    (row,) = rows_of(episode(record), None, MediaFolder(tmp_path))
    cat, dog = (f'"{reference(each)}"' for each in (CAT, DOG))
    assert {
        "picture": [None] * 5 + ["2", "1", None, None, None, "0"],
        "picture file": [None, cat, cat, cat, None, None, None, None, dog, dog, None],
    } == describe_tokens(row, None)["open_columns"]
