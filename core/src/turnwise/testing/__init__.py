"""
The public test kit: what a stranger's plugin is tested with.

Each name is imported from its own module, so that asking for one thing imports nothing else:

- `turnwise.testing.engine_suite.EngineSuite`, `parser_suite.ToolParserSuite`, `agent_suite.AgentSuite` and
  `reward_suite.RewardSuite`: conformance suites for pytest. The same checks without pytest stand in `engine_checks`,
  `parser_checks`, `agent_checks` and `reward_checks`; ``turnwise check NAME`` runs them.
- `turnwise.testing.scripted.ScriptedEngine`: a fake engine with given outputs, latencies and failures.
- `turnwise.testing.strategies`: hypothesis strategies for token records.
- `turnwise.testing.tokenizers.byte_tokenizer`: a real tokenizer with no download.
"""
