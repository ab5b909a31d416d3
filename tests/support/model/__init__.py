"""What the model checkers of both protocols share: every interleaving, crash and timeout of small programs.

Processes run small programs, each a sequence of calls. They run the code of the package, one store operation at a time,
also inside a batch. The checker provides the board, the clock and the faults.

A call cannot be copied while it waits. So a state of a process is the shortest sequence of answers that leads to it,
and the call is run again with these answers when a branch needs it. Two states are equal if they behave the same. At a
pause, the behaviour depends on the explicit state of the protocol; between two pauses, also on the answers since. So
polling without news leads back to the same state, and a space is finite.
"""
