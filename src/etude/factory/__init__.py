"""Whatever makes tasks or training material by running the agent: expert traces now."""
