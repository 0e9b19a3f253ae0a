"""Tools of the agent: specs and handlers over the sandbox's tool server. `registry.TOOLS` lists them."""
