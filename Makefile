# SPDX-License-Identifier: Apache-2.0
# A thin front of CMake: `make demo` and `make test` work on a fresh Debian or Ubuntu machine.

BUILD ?= build
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
PYTHON ?= python3
MAKEFLAGS += --no-print-directory

.PHONY: all demo test campaign bench install clean format deps

all:
	@sh tests/deps.sh build
	cmake -S . -B $(BUILD) -DCMAKE_INSTALL_PREFIX=$(PREFIX) $(CMAKE_FLAGS)
	cmake --build $(BUILD) --parallel $(JOBS)

demo: all
	@echo
	@sh examples/demo.sh $(BUILD)

test:
	@sh tests/deps.sh test
	@$(PYTHON) tests/run.py

# What takes longer than half an hour: long runs of the tests, fuzzing for NIB_FUZZ_SECONDS each.
campaign:
	@sh tests/deps.sh test
	@$(PYTHON) tests/run.py --campaign

bench: all
	@$(BUILD)/bench/shard
	@if [ -f bench/run.sh ]; then NIB=$(BUILD)/nib sh bench/run.sh; fi

install: all
	cmake --install $(BUILD)

clean:
	rm -rf $(BUILD)

format:
	clang-format -i include/*.h src/*/*.[ch] src/*/*/*.[ch] checkpoint/*/*.[ch] $(wildcard mpi/*.c bench/*.c tools/*.[ch] examples/*.c)

deps:
	@sh tests/deps.sh test
