"""How every command starts and ends: flags in, one clear line and exit code 2 for a user's mistake.

_CONFIG = config_flags.DEFINE_config_file("config", "configs/smollm2.py", lock_config=True)

def main() -> None:
    run(_CONFIG.value, _WORKDIR.value)

if __name__ == "__main__":
    run_main(main)
"""

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from dspark_jax.core.errors import Terminated, UserError
from dspark_jax.core.semantics import table_of

# XLA's C++ log lines start at warnings; jax reads this when it is imported, and leaves it if set.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
# transformers remarks at import that there is no PyTorch; only its tokenizers are used here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

FAULT_OF_USER = 2  # exit codes; 1 is left to Python's own tracebacks
INTERRUPTED = 130
TERMINATED = 143
# What a flag's parser says of a value of the wrong kind -> what it should have been.
_KINDS = {
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
    "Non-boolean argument to boolean flag": "true or false",
    "as a ConfigDict": "a group of fields; set one of them, as --config.GROUP.FIELD=VALUE",
}


def run_main(main: Callable[[], None]) -> None:
    """Parses the flags that the command defined, runs `main` and ends the process.

    Exit codes: 0 when `main` returns, 2 after one line on stderr for a `UserError` and for flags or
    config files that cannot be used, 130 after Ctrl-C, 143 after SIGTERM where a command saves
    first, 1 with the traceback for anything else. What ends one of several processes ends all.
    `--help` prints the docstring of the command and its flags, and exits 0.
    """

    def guarded(_: list[str]) -> None:
        try:
            main()
        except UserError as error:
            with ending(str(error), FAULT_OF_USER):
                _stop(str(error))
        except Terminated as error:
            _stop(str(error), TERMINATED)
        except KeyboardInterrupt:
            with ending("interrupted", INTERRUPTED):
                _interrupted()
        except Exception as error:
            fail(error)
            raise

    from dspark_jax.core.processes import ending, fail  # jax, which reads the environment above

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)
    app.run(guarded, flags_parser=_parse)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, also when it comes while jax's callback of the garbage collector runs.

    An exception raised there would be printed and forgotten, so it is asked for again a little
    later.
    """
    while frame is not None:  # this handler, too, may have been called from there
        if frame.f_code.co_name == "_xla_gc_callback":
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupted() -> NoReturn:
    """Ends the process at once: what had to be cleaned up has been, on the way here.

    Python would first tear down a runtime whose threads still compute, which can crash it.
    """
    sys.stdout.flush()
    print("dspark_jax: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _stop(message: str, code: int = FAULT_OF_USER) -> None:
    """Ends the process with `message`, on one line however it was written."""
    sys.stdout.flush()
    print(f"dspark_jax: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


def _parse(argv: list[str]) -> list[str]:
    """The flags parser given to absl, whose own one prints several lines and exits with 1."""
    if any(arg in ("--help", "-help", "-h", "--helpshort") for arg in argv[1:]):
        print(_help(argv[0]))
        sys.exit(0)
    configs = dict(_config_files(argv))
    logging.set_verbosity(logging.ERROR)  # what goes wrong while parsing is told below
    try:
        for name, path in configs.items():
            if not os.path.isfile(path):
                raise UserError(f"--{name}: no config file {path!r} (looked in {os.getcwd()})")
        rest = flags.FLAGS(argv)
        for name in configs:
            # A config file that met an OSError is refused only when it is first looked at.
            getattr(flags.FLAGS[name].value, "lock", None)
            if flags.FLAGS[name].value is None:
                raise UserError(f"config file {configs[name]}: get_config() returned None")
            overrides = dict(flags.FLAGS[name].override_values)
            if preset := overrides.pop("semantics", None):
                # After the whole file and before the fields given by themselves, in any order.
                overrides = table_of(preset) | overrides
                flags.FLAGS[name].value.update_from_flattened_dict(overrides)
    except UserError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        _interrupted()
    except Exception as error:  # whatever a user's config file may raise
        _stop(_explain(error, argv, configs))
    if rest[1:]:
        _stop(f"unexpected argument {rest[1]!r}; flags are written --name=value, see --help")
    if flags.FLAGS["verbosity"].using_default_value:
        # absl would choose INFO, and the libraries below log every file they touch at that level.
        flags.FLAGS.verbosity = logging.WARNING
    return rest


def _config_files(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (flag name, path without the variant) for every config file flag that has a value."""
    for name in flags.FLAGS:
        if not isinstance(flags.FLAGS[name].parser, ConfigFileFlagParser):
            continue
        value = flags.FLAGS[name].default
        for position, arg in enumerate(argv[1:], start=1):
            flag, equals, given = arg.partition("=")
            if flag in (f"--{name}", f"-{name}"):
                value = given if equals else "".join(argv[position + 1 : position + 2])
        if isinstance(value, str):  # a default is already a config: it was read when defined
            yield name, value.split(":", 1)[0]


def _explain(error: BaseException, argv: list[str], configs: dict[str, str]) -> str:
    """What a failed parse means for the user, from the exceptions that led to `error`.

    `configs` are the config files given, by the name of their flag.
    """
    config_files = list(configs.values())
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in reversed(chain):  # the first one raised is the one to show
        line = _line_in(cause, config_files)
        if line and isinstance(cause, UserError):
            return str(cause)
        if line:
            return f"{line}: {type(cause).__name__}: {cause}"
        if isinstance(cause, SyntaxError) and cause.filename in config_files:
            return f"config file {cause.filename} line {cause.lineno}: {cause.msg}"
    for said, kind in _KINDS.items():
        if wrong := re.match(rf"flag (--.+?): .*{re.escape(said)}", str(error), re.DOTALL):
            return f"{wrong[1]}: must be {kind}"
    message = str(chain[-1])
    if "get_config" in message:  # missing, or called with a variant it does not take
        return f"config file {', '.join(config_files)}: {message}"
    if isinstance(error, KeyError | AttributeError):
        field = re.search(r"'(\w+)'", message)
        flag = next((arg.split("=")[0] for arg in argv[1:]
                     if field and field[1] in arg.split("=")[0].split(".")), None)  # fmt: skip
        if flag:
            meant = re.search(r'Did you mean "(\w+)"', str(error))
            return f"{flag}: the config has no field {field[1]!r}" + (
                f"; did you mean {meant[1]!r}?" if meant else ""
            )
        return message
    required = re.search(r"Flag --(\w+) must have a value other than None", str(error))
    if required and required[1] in configs:
        return f"config file {configs[required[1]]}: get_config() returned None"
    return f"--{required[1]} is missing; see --help" if required else str(error)


def _line_in(error: BaseException, paths: list[str]) -> str | None:
    """Where in one of `paths` `error` passed, innermost first, or None."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path in paths:
            found = f"config file {path} line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _help(program: str) -> str:
    """The command's docstring, then its own flags with their defaults."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
    for flag in sorted(flags.FLAGS.get_key_flags_for_module(program), key=lambda flag: flag.name):
        head = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}=..."
        default = "" if flag.default is None else f" (default: {flag.default_as_str})"
        lines += [head, textwrap.fill(f"{flag.help}{default}", 96, initial_indent=" " * 6,
                                      subsequent_indent=" " * 6)]  # fmt: skip
    return "\n".join(lines)
