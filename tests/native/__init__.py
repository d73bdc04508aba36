"""The compiled core, through its bindings. The kernels alone are tested in native/tests."""
