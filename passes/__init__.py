"""The passes that find Mixture-of-Experts blocks in a graph and replace them by the fused op."""
