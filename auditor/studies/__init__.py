"""Many runs: grids, papers, ledgers."""
