python -m verl.trainer.main_ppo \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_files=train.jsonl \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml \
    reward.custom_reward_function.path=my_reward.py \
    reward.reward_manager.source=importlib \
    data.max_prompt_length=256 data.max_response_length=512 actor_rollout_ref.rollout.n=4
