"""The agent: loop, tools and prompts, the same in training, evaluation and use.

    loop.py        act(query()) until a StopReason; AgentConfig, Agent, run_agent
    chat.py        what the loop talks to: our engine token-exactly, or an OpenAI-compatible endpoint
    toolbox.py     runs the calls of a message: policy, argument checks, concurrency, truncation, scrubbing
    tools/         one small module per group of tools
    prompts.py     the system message
    compaction.py  the sentence that asks for a summary, and the state carried with it
    effort.py      the six effort counts

Nothing here imports torch.
"""
