"""One rollout, its group, the reconciler of slots, and the recorder."""
