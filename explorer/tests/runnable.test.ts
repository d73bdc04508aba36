// Copied Python prints its results.
import { expect, test } from "vitest";
import { runnable } from "../src/export/runnable";

test("bare expressions are printed; blocks end with an empty line", () => {
  const code = "import numpy as np\n\nx, y = 1.0, 2.0\nx + y  # sum\nfor _ in range(2):\n    x = x * 2\nf(x, a=1)";
  expect(runnable(code)).toBe(
    "import numpy as np\n\nx, y = 1.0, 2.0\nprint(x + y)  # sum\nfor _ in range(2):\n    x = x * 2\n\nprint(f(x, a=1))\n",
  );
  expect(runnable("sampler(logits).kept[0]")).toBe("print(sampler(logits).kept[0])\n");
});
