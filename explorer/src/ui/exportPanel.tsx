// The export panel at the end of every page:
//
//   <ExportPanel
//     name="next"                            // the command with the same JSON; also the file name
//     title={s.title}                        // of the report and the pictures
//     document={() => ({ model: modelJson(model), tokens })}  // after command, schema, lmhead: docs/json.md
//     tables={() => [{ title, columns, rows }]}      // the first is the CSV; the report has all
//     charts='[data-chart="ranked"], .curve svg'     // what SVG and PNG show: selector within <main>
//     lines={(where) => ({ python, command })}       // where(model's name): how to open it again
//     live={() => ({ kind: "cells", ... })}          // the interactive part of the report, if any
//     besideLive=".curve svg"                        // the charts that the report shows beside it
//     about={{ models: [name], prompt, settings }}   // written into pictures and reports
//   />
//
// Documents and tables are functions, called when a button is pressed. Numbers are exact; tokens are
// their own text. Code is written with `pyText`, `pyOptions`, `shell` and `commandLine` of
// ../export/quote; `command` is undefined where a shell cannot express it. Charts may be any elements,
// redrawn as SVG (see ../export/picture); data-picture="none" excludes an element.

import type { JSX } from "preact";
import { useContext, useRef, useState } from "preact/hooks";
import { csvText, type Table } from "../export/csv";
import { png, save, svgText } from "../export/files";
import type { Live } from "../export/live";
import { documentText } from "../export/jsonDocument";
import { reportText } from "../export/report";
import { fill, Language, LANGUAGES, useStrings } from "../i18n/strings";
import { Models, Version } from "../models";
import { settings } from "../url";

export interface CodeLines {
  readonly python: string;
  readonly command?: string | undefined;
  /** A remark about the code, e.g. that it reads a file. */
  readonly note?: string | undefined;
}

export interface ExportPanelProps {
  readonly name: string;
  readonly title: string;
  document(): object | Promise<object>;
  tables(): readonly Table[];
  readonly charts: string;
  lines(where: (model: string) => string): CodeLines;
  /** The interactive part of the report. */
  live?(): Live;
  /** The charts of a report that has an interactive part; all if not given. */
  readonly besideLive?: string;
  /** What the numbers belong to; by default the page's model and the settings in the address. */
  readonly about?: About;
}

/** What exported numbers belong to. */
export interface About {
  /** One name, or two that are compared. */
  readonly models: readonly string[];
  readonly prompt: string;
  /** Readable settings; empty for none. */
  readonly settings: string;
}

const COLOURS = ["--ground", "--panel", "--ink", "--soft", "--line", "--accent"];

export function ExportPanel(props: ExportPanelProps): JSX.Element {
  const { name, title, charts } = props;
  const { exports: s, common } = useStrings();
  const { tag } = LANGUAGES[useContext(Language)];
  const version = useContext(Version);
  const models = useContext(Models);
  const [status, setStatus] = useState("");
  const shown = useRef<HTMLDetailsElement>(null);
  const given = (model: string): string => models.find((one) => one.name === model)?.given ?? model;
  const { python, command, note } = props.lines(given);

  const about = (): string[] => {
    const { models: names, prompt, settings: chosen } = props.about ?? { models: [], prompt: "", settings: settings() };
    const named = names.length ? ` · ${s.model}${common.colon}${[...new Set(names)].join(", ")}` : "";
    return [
      `lmhead ${version} · ${new Date().toISOString().slice(0, 10)}${named}`,
      ...(prompt ? [`${s.prompt}${common.colon}${prompt.replace(/\s+/g, " ").slice(0, 400)}`] : []),
      ...(chosen ? [`${s.settings}${common.colon}${chosen}`] : []),
    ];
  };
  const drawn = (which = charts): Element[] => [...document.querySelectorAll(`main :is(${which})`)];
  const keep = (kind: string, type: string, make: () => string | Blob | Promise<string | Blob>): void => {
    const file = `lmhead-${name}.${kind}`;
    Promise.resolve()
      .then(make)
      .then((content) => save(file, content, type))
      .then(
        () => setStatus(fill(s.saved, { file })),
        (error: Error) => setStatus(fill(s.failed, { message: error.message })),
      );
  };
  const report = (): string => {
    const style = getComputedStyle(document.documentElement);
    // A report may be shared, so it names a model without its folders.
    const lines = props.lines((model) => given(model).split(/[\\/]/).filter(Boolean).at(-1) ?? model);
    return reportText({
      title,
      lang: tag,
      colours: Object.fromEntries(COLOURS.map((colour) => [colour, style.getPropertyValue(colour)])),
      about: about(),
      pictures: drawn(props.besideLive).map((chart) => svgText([chart], title)),
      live: props.live?.(),
      tables: props.tables(),
      lines: [[s.python, lines.python], ...(lines.command ? [[s.command, lines.command] as const] : [])],
      foot: fill(s.foot, { version, date: new Date().toISOString().slice(0, 10) }),
    });
  };
  const files: [string, string, string, () => string | Blob | Promise<string | Blob>][] = [
    ["json", "JSON", "application/json", async () => documentText(name, version, await props.document())],
    ["csv", "CSV", "text/csv", () => csvText(props.tables()[0] ?? { columns: [], rows: [] })],
    ["svg", "SVG", "image/svg+xml", () => svgText(drawn(), title, about())],
    ["png", "PNG", "image/png", () => png(drawn(), title, about())],
    ["html", s.report, "text/html", report],
  ];
  const copy = (kind: "python" | "command", line: string): void => {
    const failed = (): void => {
      // No clipboard, e.g. over plain HTTP from another machine: show and select the code instead.
      if (shown.current) shown.current.open = true;
      const code = shown.current?.querySelector(`[data-line=${kind}]`);
      if (code) getSelection()?.selectAllChildren(code);
      setStatus(s.select);
    };
    if (!navigator.clipboard) return failed();
    navigator.clipboard.writeText(line).then(() => setStatus(s.copied), failed);
  };

  return (
    <section class="exports" aria-labelledby="exports-title" data-picture="none">
      <h2 id="exports-title">{s.title}</h2>
      <div class="controls buttons">
        {files.map(([kind, label, type, make]) => (
          <button key={kind} type="button" data-export={kind} onClick={() => keep(kind, type, make)}>
            {label}
          </button>
        ))}
      </div>
      <div class="controls buttons">
        <button type="button" data-export="python" onClick={() => copy("python", python)}>
          {s.copyPython}
        </button>
        <button type="button" data-export="command" disabled={!command} onClick={() => copy("command", command ?? "")}>
          {s.copyCommand}
        </button>
        <span class="note" role="status" data-chart="exported">
          {status}
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
