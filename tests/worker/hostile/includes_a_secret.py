"""It has the compiler print a secret.

Verdict: error: does not compile: .*No such file or directory
Needs: a compiler
"""

from torch.utils.cpp_extension import load_inline

load_inline("includes_a_secret", cpp_sources='#include "@SECRET@"', no_implicit_headers=True, is_python_module=False)
