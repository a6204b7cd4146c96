"""The passes that find Mixture-of-Experts blocks in a graph and replace them by the fused op.

`graph` reads a graph, `facts` proves what its values are, `blocks` finds the blocks among them, `fusing` puts the op in
their place. `loops` makes such graphs of loops over experts, and takes their proof as a block's.
"""
