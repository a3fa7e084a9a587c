"""Names under which the engine and the scheduler's `HeadsSwap` find each other; importable without SGLang."""

# Methods of the scheduler.
PREPARE = "specroll_prepare_heads"
COMMIT = "specroll_commit_heads"
CHECKSUMS = "specroll_checksums"
DISTURB = "specroll_disturb_heads"
# In the scheduler's internal state: the fields of `HeadsState`.
STATE_KEY = "specroll_heads_state"
# In a finished request's information: [(version, first token)].
SPANS_KEY = "specroll_heads"
