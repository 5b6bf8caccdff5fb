"""References are strangers' code: what they may say (`static`, `allowed`), and where they run (`worker`).

`allowed` and `static` need no torch and are used wherever a reference is read; `worker` runs references in a process
of their own. SECURITY.md tells what both promise.
"""
