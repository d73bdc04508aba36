// Python code that prints its results, as a file and at the prompt.

const STATEMENT = /^(import |from |for |if |with |def |class |print\(|#|[\w, [\]]+ = |loss\.backward\(\))/;

/** The code with every bare expression printed, and an empty line after each indented block, which the prompt needs. */
export function runnable(code: string): string {
  const lines = code.split("\n").flatMap((line, at, all) => {
    const before = all[at - 1] ?? "";
    const gap = before.startsWith(" ") && line && !line.startsWith(" ") ? [""] : [];
    if (!line || line.startsWith(" ") || STATEMENT.test(line)) return [...gap, line];
    const [, expression = line, comment = ""] = /^(.*?)(\s+#.*)?$/.exec(line) ?? [];
    return [...gap, `print(${expression})${comment}`];
  });
  return `${lines.join("\n").trimEnd()}\n`;
}
