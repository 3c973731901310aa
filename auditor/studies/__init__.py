"""Run grids of audits, reproduce papers, and judge their claims in ledgers."""
