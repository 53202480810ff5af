# On a machine with python3, make and git: `make train` trains a network, `make test` runs the tests.
# Each makes .venv and installs what it needs there, when that is missing or out of date.

PLAN = gpt2 --batch-size 64 --memory-budget 4GiB --card rtx4090
TRAIN = digits --batch-size 512 --memory-budget 64MiB --threads 1 --compare

.PHONY: train test slow torture benchmark accuracy pictures clean

train: .venv/installed-for-train
	.venv/bin/python -m bigbatch train $(TRAIN)

test: .venv/installed-for-test
	scripts/check
	scripts/test

slow: .venv/installed-for-test
	scripts/test -m slow

# Long: every allocation of a step fails once, runs are killed, saved files are damaged. docs/reliability.md has the tables.
torture: .venv/installed-for-test
	.venv/bin/python -m tests.torture.allocation_failures
	.venv/bin/python -m tests.torture.allocation_failures --double
	.venv/bin/python -m tests.torture.real_limits
	.venv/bin/python -m tests.torture.kill_while_saving
	.venv/bin/python -m tests.torture.kill_while_training
	.venv/bin/python -m tests.torture.sharded_checkpoints
	.venv/bin/python -m tests.torture.corrupt
	.venv/bin/python -m tests.torture.disk_full
	.venv/bin/python -m tests.torture.ranks --trials 200

benchmark: .venv/installed-for-test
	.venv/bin/python benchmarks/overhead.py
	.venv/bin/python -m benchmarks.ranks

# Long: more than an hour, and up to 6 GB of memory. Results are kept, so that it may be interrupted.
accuracy: .venv/installed-for-test
	.venv/bin/python -m benchmarks.planner.accuracy --results accuracy.jsonl --write docs/accuracy.md
	.venv/bin/python -m benchmarks.planner.budgets

# Those of README and docs: times are estimated, so that every machine makes the same ones.
pictures: .venv/installed-for-test
	mkdir -p docs/images
	.venv/bin/python -m bigbatch plan $(PLAN) --frontier docs/images/frontier.png --timeline docs/images/timeline.png
	.venv/bin/python -m bigbatch plan unet --batch-size 64 --memory-budget 1GiB --card rtx4090 \
	  --frontier docs/images/unet-frontier.png --timeline docs/images/unet-timeline.png

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed-for-train: pyproject.toml constraints.txt scripts/install
	scripts/install demo,log,plot
	touch $@

# Tests need all that training needs.
.venv/installed-for-test: pyproject.toml constraints.txt scripts/install
	scripts/install test
	touch $@ .venv/installed-for-train
