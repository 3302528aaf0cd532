"""Expert parallelism's two all-to-alls: the operations, and the exchanges that carry them out."""
