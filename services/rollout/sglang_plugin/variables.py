"""Environment variables through which the engine tells SGLang's processes how to run."""

# Set by `RolloutEngine` before SGLang's processes start. Without it the plugin only registers names, so an
# SGLang server that somebody starts from the same environment behaves as if the plugin were not there.
ENABLE_VARIABLE = "SPECROLL_ENGINE"
# Cores and OpenMP threads of the scheduler process, which runs the model: "0,1" and "2".
CPUS_VARIABLE = "SPECROLL_ENGINE_CPUS"
THREADS_VARIABLE = "SPECROLL_ENGINE_THREADS"
# "sglang" keeps SGLang's own sampler, for comparison; its log-probabilities are not those of the final law.
SAMPLER_VARIABLE = "SPECROLL_ENGINE_SAMPLER"
# The speculation section of the engine's configuration as JSON.
SPECULATION_VARIABLE = "SPECROLL_ENGINE_SPECULATION"
# Where training rows for heads go, as JSON: the arguments of `RowSender`. Without it none are kept.
FEEDBACK_VARIABLE = "SPECROLL_ENGINE_FEEDBACK"
# In a request's custom parameters: the fields of its `SpeculationOverride`. A request that brings a seed has the rule
# "target_match": no sampled children, so that its seed alone decides its tokens.
OVERRIDE_KEY = "specroll"
