"""Chat templates: messages to token ids, and proofs that a template only appends."""
