"""The trainer of `test_trl_grpo.py`, in its own file: TRL takes seconds to import."""

from turnwise_trl_bridge import TurnwiseGRPOTrainer


class GapTrainer(TurnwiseGRPOTrainer):
    """Records the largest gap between computed and sampled log-probabilities on trained tokens."""

    def _compute_loss(self, model, inputs):
        self.inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        result = super()._get_per_token_logps_and_entropies(*arguments, **options)
        if getattr(self, "inputs", None) is not None:
            mask = (self.inputs["completion_mask"] * self.inputs["tool_mask"]).bool()
            gap = (result[0].detach() - self.inputs["old_per_token_logps"]).abs()[mask]
            self.gaps = [*getattr(self, "gaps", []), float(gap.max())]
            self.inputs = None
        return result
