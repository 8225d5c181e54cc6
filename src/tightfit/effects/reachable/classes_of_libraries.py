"""Which objects of libraries hold state of a program's, by the modules of their classes."""

# Of Python's own packages and modules, those with classes that users put settings and calls in; a logger or a lock is no state of a model.
BAGS = ("types", "argparse", "unittest.mock")
# What logs, waits or describes code is no state of a model either.
STATELESS = frozenset(
    [
        "tightfit",
        "torch",
        "logging",
        "abc",
        "typing",
        "importlib",
        "inspect",
        "enum",
        "concurrent",
        "asyncio",
        "subprocess",
        "socket",
        "selectors",
        "re",
        "pathlib",
        "contextlib",
        "unittest",
        "weakref",
        "warnings",
        "traceback",
        "tempfile",
        "ast",
        "dis",
        "code",
        "codecs",
        "os",
        "shutil",
        "time",
        "threading",
        "multiprocessing",
        "queue",
        "signal",
    ]
)
# Of Python's own, those whose objects in C keep what they were given: compressors, parsers, trees. Without underscores.
IN_C = frozenset(["zlib", "bz2", "lzma", "hashlib", "pyexpat", "xml", "pickle", "multibytecodec", "lsprof"])
# What counts steps, though it is torch's.
COUNTING = (
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.amp.grad_scaler",
    "torch.cuda.amp.grad_scaler",
)
# Whose objects in C hold arrays, and replace them rather than themselves.
OF_ARRAYS = ("pandas",)
# Whose objects in C keep what they were made with, or would take long to write down.
UNCHANGING = frozenset(
    [
        *(
            "numpy",
            "torch",
            "tightfit",
            "tokenizers",
            "tiktoken",
            "PIL",
            "regex",
            "pyarrow",
            "polars",
            "h5py",
            "safetensors",
        ),
        *("pydantic_core", "orjson", "yaml", "lxml", "triton", "cupy", "jaxlib", "matplotlib", "google", "grpc"),
    ]
)
