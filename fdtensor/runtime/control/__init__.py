"""The control plane: what ranks tell each other beside the data, so that none waits forever.

It uses a store of its own and, to agree, groups of its own, so that no agreement meets data. Each
file defines one thing, in this order:

    sockets    the sockets of process groups, and how waits on them end
    places     the lines of the user that are running
    causes     what an error says to other ranks, and whether it came from the network
    posts      what a rank says of itself when something has gone wrong, and the one error of all
    patience   how long a rank waits for others, which may be planning
    board      where posts hang: keys in a store
    kept       the last calls of a ledger
    ledger     the calls of a rank on a set of ranks, with a rolling fingerprint
    waits      the wait for what a call has begun and left under way
    agreement  how the ranks of a ledger compare what they are about to do
    flight     the last calls of a rank as a file
    watcher    the thread that looks at the board while the main thread waits
    groups     the process groups of a thread: made, met, cut and made anew
    plane      all of it for a thread
    process    the planes of a process, its end and its forks
"""
