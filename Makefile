# What to run before a commit, in the environment of `pip install -c constraints.txt -e '.[dev]'`.

.PHONY: check test site

# a few minutes: style, types, modules and notebooks in step, the quick tests
check:
	ruff format --check nbs tests tools setup.py
	ruff check
	mypy
	nbdev_export && nbdev_clean
	python tools/make_readme.py --check
	pytest -q tests/test_repository.py tests/test_house.py tests/test_reader.py tests/test_editor.py
	OMP_NUM_THREADS=1 pytest -q -n 2 tests/test_maths.py tests/test_data.py tests/test_config.py \
	    "tests/test_options_act.py::test_each_option_has_a_row" \
	    "tests/test_cli.py::test_configs_load"

# all notebooks and all tests: the README's command without its installation
test:
	nbdev_test && OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile tests

# needs `pip install -c constraints.txt -e '.[docs]'`
site:
	sphinx-build -W --keep-going -c tools/site nbs _site
