"""The harness: plans, their proof, and their four consumers (execute, simulate, print, save).

`harness` sits both below the strategies (problem, sharding, plan, build) and above them (execute,
simulate, results, cli). The import contract in pyproject.toml keeps the two halves apart.
"""
