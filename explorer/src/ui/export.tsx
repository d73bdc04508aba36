// What a page lets its reader take along. Every page ends with one of these:
//
//   <Exports
//     name="next"                            // the command whose --json the document is; names the files
//     title={s.title}                        // of the report and the pictures
//     document={() => ({ model: modelJson(model), tokens })}  // behind command, schema, lmhead: docs/json.md
//     tables={() => [{ title, columns, rows }]}      // the first is the CSV; the report has all
//     charts='[data-chart="ranked"], .curve svg'     // what SVG and PNG show: selector within <main>
//     lines={(where) => ({ python, command })}       // where(model's name): how to open it again
//   />
//
// All are functions, called when a button is pressed: a page that is only looked at pays nothing but
// the lines. Numbers go in as numbers, in full; tokens go in as their own text. Lines are written with
// `pyText`, `pyOptions`, `shell` and `commandLine` of ../export/quote; `command: undefined` where a
// shell cannot say it. Charts may be any elements: boxes and texts are drawn again as SVG (see
// ../export/picture); what should stay out of a picture has data-picture="none".

import type { JSX } from "preact";
import { useContext, useRef, useState } from "preact/hooks";
import { csvText, type Table } from "../export/csv";
import { png, save, svgText } from "../export/files";
import { documentText } from "../export/json";
import { reportText } from "../export/report";
import { fill, Language, LANGUAGES, useStrings } from "../i18n";
import { Models, Version } from "../models";

export interface Lines {
  readonly python: string;
  readonly command?: string | undefined;
  /** What is to be known of the lines, e.g. that a file must be at hand. */
  readonly note?: string | undefined;
}

export interface ExportsProps {
  readonly name: string;
  readonly title: string;
  document(): object | Promise<object>;
  tables(): readonly Table[];
  readonly charts: string;
  lines(where: (model: string) => string): Lines;
}

const COLOURS = ["--ground", "--panel", "--ink", "--soft", "--line"];

export function Exports(props: ExportsProps): JSX.Element {
  const { name, title, charts } = props;
  const { exports: s } = useStrings();
  const { tag } = LANGUAGES[useContext(Language)];
  const version = useContext(Version);
  const models = useContext(Models);
  const [said, setSaid] = useState("");
  const shown = useRef<HTMLDetailsElement>(null);
  const given = (model: string): string => models.find((one) => one.name === model)?.given ?? model;
  const { python, command, note } = props.lines(given);

  const drawn = (): Element[] => [...document.querySelectorAll(`main :is(${charts})`)];
  const keep = (kind: string, type: string, make: () => string | Blob | Promise<string | Blob>): void => {
    const file = `lmhead-${name}.${kind}`;
    Promise.resolve()
      .then(make)
      .then((content) => save(file, content, type))
      .then(
        () => setSaid(fill(s.saved, { file })),
        (error: Error) => setSaid(fill(s.failed, { message: error.message })),
      );
  };
  const report = (): string => {
    const style = getComputedStyle(document.documentElement);
    // A report may be handed on: a model is named there without the folders of this machine.
    const lines = props.lines((model) => given(model).split(/[\\/]/).filter(Boolean).at(-1) ?? model);
    return reportText({
      title,
      lang: tag,
      colours: Object.fromEntries(COLOURS.map((colour) => [colour, style.getPropertyValue(colour)])),
      pictures: drawn().map((chart) => svgText([chart], title)),
      tables: props.tables(),
      lines: [[s.python, lines.python], ...(lines.command ? [[s.command, lines.command] as const] : [])],
      foot: fill(s.foot, { version, date: new Date().toISOString().slice(0, 10) }),
    });
  };
  const copy = (kind: "python" | "command", line: string): void => {
    const failed = (): void => {
      // No clipboard here (a page from another machine): the line is shown and marked instead.
      if (shown.current) shown.current.open = true;
      const code = shown.current?.querySelector(`[data-line=${kind}]`);
      if (code) getSelection()?.selectAllChildren(code);
      setSaid(s.select);
    };
    if (!navigator.clipboard) return failed();
    navigator.clipboard.writeText(line).then(() => setSaid(s.copied), failed);
  };

  return (
    <section class="exports" aria-labelledby="exports-title" data-picture="none">
      <h2 id="exports-title">{s.title}</h2>
      <div class="controls buttons">
        <button type="button" data-export="json" onClick={() => keep("json", "application/json", async () => documentText(name, version, await props.document()))}>
          JSON
        </button>
        <button type="button" data-export="csv" onClick={() => keep("csv", "text/csv", () => csvText(props.tables()[0] ?? { columns: [], rows: [] }))}>
          CSV
        </button>
        <button type="button" data-export="svg" onClick={() => keep("svg", "image/svg+xml", () => svgText(drawn(), title))}>
          SVG
        </button>
        <button type="button" data-export="png" onClick={() => keep("png", "image/png", () => png(drawn(), title))}>
          PNG
        </button>
        <button type="button" data-export="html" onClick={() => keep("html", "text/html", report)}>
          {s.report}
        </button>
      </div>
      <div class="controls buttons">
        <button type="button" data-export="python" onClick={() => copy("python", python)}>
          {s.copyPython}
        </button>
        <button type="button" data-export="command" disabled={!command} onClick={() => copy("command", command ?? "")}>
          {s.copyCommand}
        </button>
        <span class="note" role="status" data-chart="exported">
          {said}
        </span>
      </div>
      {note ? <p class="note">{note}</p> : null}
      <details ref={shown}>
        <summary>{s.lines}</summary>
        <pre tabIndex={0}>
          <code data-line="python">{python}</code>
        </pre>
        {command ? (
          <pre tabIndex={0}>
            <code data-line="command">{command}</code>
          </pre>
        ) : null}
      </details>
    </section>
  );
}
