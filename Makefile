# make demo and make test set everything up by themselves: Python 3.11 or newer and pip are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.spark-installed

.PHONY: venv demo test test-docker docker-wheels docker-lock image lint format bench studies-quick proto clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "SPARK needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

venv: $(STAMP)  ## .venv with everything the other targets need

demo: venv  ## 20 peers learn handwritten digits together; a minute
	$(BIN)/spark-dfl run --preset demo

test: venv  ## the whole test suite
	$(BIN)/python -m pytest -n auto --maxschedchunk 1 tests

test-docker: venv  ## the network in real containers, with Prometheus; starts an engine where none runs (as root)
	SPARK_TEST_DOCKER=1 $(BIN)/python -m pytest -rs --timeout 1200 tests/docker

docker-wheels: venv  ## wheels for images that are built where no index can be reached
	$(BIN)/python deploy/docker/wheels.py

docker-lock: venv  ## the versions in images, anew
	$(BIN)/python deploy/docker/lock.py

image:  ## the image spark-dfl:latest, for docker-compose.yml
	docker build -f deploy/docker/Dockerfile -t spark-dfl:latest .

lint: venv  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

GENERATED := spark_node/generated
proto: venv  ## the Python stubs of proto/, after a change there
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(GENERATED) --pyi_out=$(GENERATED) \
	  --grpc_python_out=$(GENERATED) proto/spark/v1/*.proto
	sed -i 's/^from spark\.v1 import/from spark_node.generated.spark.v1 import/' $(GENERATED)/spark/v1/*_pb2*.py*

bench: venv  ## every benchmark at its quick size; results in benchmarks/out
	mkdir -p benchmarks/out
	for f in benchmarks/[a-z]*.py; do \
	  $(BIN)/python $$f --quick --json benchmarks/out/$$(basename $$f .py).json || exit 1; done

studies-quick: venv  ## every study at its quick size, with an index; finished runs are kept, so it goes on where it stopped
	$(BIN)/spark-dfl compare benchmarks/studies/*.toml --quick --out benchmarks/out/studies

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
