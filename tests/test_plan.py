"""The plan of a call: its positions, and how it is cut."""

import torch
from conftest import held, left_padded, plan_for

from hf_dynyarn.plan import make_plan
from hf_dynyarn.schedules import YaRNSchedule


def columns(plan):
    return [(segment.start, segment.stop) for segment in plan.segments]


class TestSegments:
    def test_cut_where_the_scale_changes(self):
        assert columns(plan_for(50)) == [(0, 32), (32, 40), (40, 48), (48, 50)]

    def test_continue_where_the_cache_ends(self):
        assert columns(plan_for(20, held([list(range(35))]))) == [(0, 5), (5, 13), (13, 20)]

    def test_one_for_a_step(self):
        assert columns(plan_for(1, held([list(range(40))]))) == [(0, 1)]

    def test_cut_where_any_row_changes(self):
        _, mask = left_padded([torch.zeros(40), torch.zeros(35)])
        assert columns(plan_for(40, mask=mask, rows=2)) == [(0, 32), (32, 37), (37, 40)]

    def test_padding_cuts_nothing(self):
        mask = torch.ones(1, 60, dtype=torch.long)
        mask[0, 35:45] = 0
        cache = held([[*range(35)]])
        assert columns(plan_for(25, cache, mask=mask)) == [(0, 15), (15, 23), (23, 25)]

    def test_cut_where_a_document_starts_and_see_nothing_before(self):
        positions = torch.tensor([[*range(34), *range(6)]])
        plan = plan_for(40, position_ids=positions)
        assert columns(plan) == [(0, 32), (32, 34), (34, 40)]
        assert [segment.first for segment in plan.segments] == [0, 0, 34]

    def test_of_one_length_for_the_whole_call_under_the_papers_rule(self):
        schedule = YaRNSchedule(16, 1e4, 32, 8, per_forward=True)
        ids = torch.zeros(1, 50, dtype=torch.long)
        plan = make_plan(schedule, None, ids, None, None, "sdpa", False)
        assert columns(plan) == [(0, 50)]


class TestPositions:
    def test_count_on_from_the_cache(self):
        assert plan_for(3, held([[0, 1, 2, 3]])).workspace.positions[:, 4:].tolist() == [[4, 5, 6]]

    def test_count_what_the_mask_shows(self):
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        assert plan_for(5, mask=mask, rows=2).workspace.positions.tolist() == [
            [-1, -1, 0, 1, 2],
            [0, 1, 2, 3, 4],
        ]

    def test_remember_padding_without_a_mask(self):
        plan = plan_for(2, held([[-1, -1, 0, 1], [0, 1, 2, -1]]), rows=2)
        assert plan.workspace.positions[:, 4:].tolist() == [[2, 3], [3, 4]]
        assert plan.masks.visible.tolist() == [
            [False, False, True, True, True, True],
            [True, True, True, False, True, True],
        ]

    def test_are_the_callers_where_given(self):
        assert (
            plan_for(3, position_ids=torch.tensor([[7, 8, 9]]), rows=2).workspace.positions.tolist()
            == [[7, 8, 9]] * 2
        )

    def test_any_integer_type_will_do(self):
        positions = torch.tensor([[4, 5, 6]], dtype=torch.int32)
        assert plan_for(
            3, held([[0, 1, 2, 3]]), position_ids=positions
        ).workspace.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
