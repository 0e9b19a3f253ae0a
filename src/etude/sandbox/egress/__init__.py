"""What leaves a sandbox: nothing, or what a policy names, and then with a record of it.

    policy = NetworkPolicy.of(["build=pypi.org", "build=files.pythonhosted.org"])
    sandbox = await host.create(image, network=policy)
    sandbox.network.set_phase("agent")     # from now on nothing
    sandbox.network.log.lines              # every name asked for, every connection, every request

    door.py           joins one sandbox to what follows
    policy.py         who may be reached, when and how; pure
    proxy.py          the host's end: takes the connections of a sandbox, checks them, carries them out
    names.py          the resolver of a sandbox: allowed names get made-up addresses, no query leaves the host
    certificates.py   the authority that one sandbox trusts, so that requests under TLS can be read
    index.py          package indexes, with everything that was published after a date left out
    record.py         the log

How a connection comes here: `zygote.py` gives the sandbox's network namespace a route that makes every IPv4 address its
own, opens listening sockets on the ports of the policy, and hands them out to the host before it drops its
capabilities. The namespace has no other way out, so programs that know nothing of proxies arrive here too, and inside
there is nothing that could be tampered with.
"""
