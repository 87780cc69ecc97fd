# Two commands, each from nothing: `make sweep` and `make test`. ARGS is passed on, for example
#   make sweep ARGS="--help"      make test ARGS="-k import"
.PHONY: sweep test setup

sweep: setup
	.venv/bin/python -m harness sweep $(ARGS)

test: setup
	scripts/check $(ARGS)

setup:
	scripts/setup
