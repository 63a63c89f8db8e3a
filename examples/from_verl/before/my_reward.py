"""The custom reward function and the reward manager of a run in verl."""

import re

import torch


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 if the last number of the response is the ground truth."""
    numbers = re.findall(r"-?\d+", solution_str)
    return {"score": float(numbers[-1:] == [ground_truth]), "numbers": len(numbers)}


class MyRewardManager:
    """Scores each row by `compute_score`, and punishes long responses."""

    def __init__(self, tokenizer, num_examine, compute_score=compute_score, reward_fn_key="data_source", **kwargs):
        self.tokenizer, self.compute_score, self.reward_fn_key = tokenizer, compute_score, reward_fn_key
        self.max_characters = kwargs.get("max_characters", 400)

    def score_response(self, data_source, solution_str, ground_truth, extra_info):
        """Return the score of one response and numbers for the log."""
        result = self.compute_score(data_source, solution_str, ground_truth, extra_info)
        too_long = len(solution_str) > self.max_characters
        return {**result, "score": result["score"] - 0.5 * too_long, "too_long": float(too_long)}

    def __call__(self, data, return_dict=False):
        """Return (rows, response length) scores, each on the last token of its response."""
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for index in range(len(data)):
            item = data[index]
            prompt_length = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            row = item.non_tensor_batch
            truth, extra_info = row["reward_model"]["ground_truth"], row.get("extra_info")
            result = self.score_response(row[self.reward_fn_key], text, truth, extra_info)
            rewards[index, length - 1] = result["score"]
        return {"reward_tensor": rewards} if return_dict else rewards
