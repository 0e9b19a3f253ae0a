"""The native inference engine: scheduler, paged cache, runner, sampler, in-flight weight swap."""
