// What a page exports, as text: JSON, CSV, lines of a shell and of Python, the report.
import { expect, test } from "vitest";
import { csvText } from "../src/export/csv";
import { documentText, jsonText } from "../src/export/jsonDocument";
import { common } from "../src/export/picture";
import { commandLine, pyOptions, pyText, shell, fitsShell } from "../src/export/quote";
import { escaped, reportText } from "../src/export/report";
import { LANGUAGES } from "../src/i18n/strings";
import { explained } from "../src/next/nextExport";
import { activeStages, NEUTRAL, ORDERS } from "../src/sampler/options";
import { Processed } from "../src/sampler/process";
import { Row } from "../src/sampler/row";
import { trainTables } from "../src/train/trainExport";

test("a document begins as those of the command line do, and holds finite numbers alone", () => {
  const text = documentText("next", "1.2.3", {
    p: NaN,
    most: -Infinity,
    tokens: [{ id: 1, bytes: [104, 105] }],
    none: [],
    gone: undefined,
  });
  expect(JSON.parse(text)).toEqual({
    command: "next",
    schema: 1,
    lmhead: "1.2.3",
    p: null,
    most: null,
    tokens: [{ id: 1, bytes: [104, 105] }],
    none: [],
  });
  expect(text).toContain('\n  "tokens": [\n    {"id": 1, "bytes": [104, 105]}\n  ]');
});

test("JSON has no character that a terminal would obey", () => {
  const hostile = "\u001b[2J\u009b\u202e\u2066é你";
  const text = jsonText({ hostile });
  expect(JSON.parse(text)).toEqual({ hostile });
  expect(text).not.toMatch(/[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066]/);
  expect(text).toContain("é你");
});

test("CSV: RFC 4180, and no cell is a formula", () => {
  const rows = [
    ["=HYPERLINK(1)", "+1+1", "-2+3", "@SUM(1)", "＝1"],
    ["-0.5", "+3e-7", -0.25, 1e-9, NaN],
    ['say "hi"', "a,b", "line\nend", " space ", "\tx"],
    [null, undefined, true, "", "你"],
  ];
  expect(csvText({ columns: ["a", "b", "c", "d", "e"], rows })).toBe(
    [
      "a,b,c,d,e",
      "'=HYPERLINK(1),'+1+1,'-2+3,'@SUM(1),'＝1",
      "-0.5,+3e-7,-0.25,1e-9,",
      '"say ""hi""","a,b","line\nend"," space ",\'\tx',
      ",,true,,你",
      "",
    ].join("\r\n"),
  );
});

test("words of a shell", () => {
  expect(shell("tiny")).toBe("tiny");
  expect(shell("")).toBe("''");
  expect(shell("it's $HOME `x` !")).toBe("'it'\\''s $HOME `x` !'");
  expect(shell("a\nb\\c'\u001b")).toBe("$'a\\nb\\\\c\\'\\033'");
  expect(shell("\u202e")).toBe("$'\\342\\200\\256'");
  expect(fitsShell("a\0")).toBe(false);
  expect(commandLine("next", "tiny", "a b", ["--top 3"])).toBe("lmhead next tiny --top 3 'a b'");
  expect(commandLine("next", "tiny", "-x", [])).toBe("lmhead next tiny -- -x");
  expect(commandLine("next", "tiny", "-", [])).toBe("printf %s - | lmhead next tiny -");
});

test("strings and options of Python", () => {
  expect(pyText('a"b\\\n\u001b\u202e你')).toBe('"a\\"b\\\\\\n\\u001b\\u202e你"');
  expect(pyOptions({ temperature: 2, top_k: 40, order: "hf" }, ["top_k"])).toBe(
    'temperature=2.0, top_k=40, order="hf"',
  );
});

test("a report escapes what it is given, and says that nothing may run", () => {
  const hostile = `</script><img src=x onerror='alert(1)'>"\u202e`;
  const text = reportText({
    title: hostile,
    lang: "en",
    colours: { "--ink": "#fff; } </style><script>" },
    about: [hostile],
    pictures: ["<svg></svg>"],
    tables: [{ title: hostile, columns: [hostile, "p", "q", "r"], rows: [[hostile, 0.5, NaN, null]] }],
    lines: [[hostile, hostile]],
    foot: hostile,
  });
  expect(text).not.toMatch(/<script|<img|\u202e/);
  expect(text).toContain("default-src 'none'");
  expect(text).toContain('<td class="n">0.5000</td>');
  expect(escaped("<&>\"'")).toBe("&lt;&amp;&gt;&quot;&#39;");
});

test("the tables of a report are for people: their language, their digits, ranks from 1", () => {
  const text = (lang: string): string =>
    reportText({
      title: "",
      lang,
      colours: {},
      about: [],
      pictures: [],
      tables: [
        {
          title: "",
          columns: ["rank", "id", "p", "log_prob", "cut_by"],
          rows: [
            [0, 12345, 0.123456789012345, -1.5e-7, "top_k"],
            [1201, 6, 1, null, "\n"],
          ],
        },
        { title: "", columns: ["way", "tensor", "bytes"], rows: [["dense", "grad_logits", 1610612736]] },
        { title: "", columns: ["sum", "value"], rows: [["scored_tokens", 28]] },
        {
          title: "",
          columns: ["logit", "tokens_per_second"],
          rows: [
            [-2, 314.9],
            [3.1, 1426],
          ],
        },
      ],
      lines: [],
      foot: "",
    });
  const cells = (html: string): string[] =>
    [...html.matchAll(/<t[hd]\b[^>]*>([^<]*)</g)].map(([, content]) => content ?? "");
  expect(cells(text("en"))).toEqual(
    [
      "rank (from 1)",
      "id",
      "p",
      "log p",
      "removed by",
      "1",
      "12345",
      "0.1235",
      "−1.50e−7",
      "Top-k",
      "1,202",
      "6",
      "1.0000",
      "–",
      "↵",
    ].concat([
      "method",
      "tensor",
      "bytes",
      "all logits",
      "gradient of the logits",
      "1,610,612,736",
      "measure",
      "value",
      "tokens scored",
      "28",
      "logit",
      "tokens per second",
      "−2.0000",
      "315",
      "3.1000",
      "1,426",
    ]),
  );
  expect(cells(text("zh-Hans"))).toEqual(
    expect.arrayContaining([
      "排名（从 1 起）",
      "编号",
      "被哪个步骤去除",
      "算法",
      "全部 logit",
      "logit 的梯度",
      "计分的词元数",
    ]),
  );
});

test("the table of the memory has names for machines, and each has a heading", () => {
  const tables = trainTables(
    { vocab: 100, width: 8, tokens: 16, dtype: "float32", written: "plain", maxBytes: 1 << 20 },
    null,
    LANGUAGES.zh.strings.train,
  );
  for (const column of tables.flatMap(({ columns }) => columns)) {
    expect(column).toMatch(/^[a-z_]+$/);
    expect(LANGUAGES.zh.strings.exports.columns).toHaveProperty(column);
  }
});

test("the steps of a sampler add up", () => {
  const row = new Row(Float32Array.from({ length: 50 }, (_, id) => Math.sin(id * id) * 4));
  for (const order of ["hf", "llama.cpp"] as const) {
    const stages = activeStages({ ...NEUTRAL, temperature: 0.7, top_k: 20, top_p: 0.9, min_p: 0.05 }, ORDERS[order]);
    const processed = new Processed(row, stages);
    const done = explained({ row, processed, chain: { stages, order: ORDERS[order], seed: 3 }, counting: "hf" });
    expect(done.map(({ stage }) => stage)).toEqual(
      order === "hf"
        ? ["logits", "temperature", "top_k", "top_p", "min_p"]
        : ["logits", "top_k", "top_p", "min_p", "temperature"],
    );
    expect(done.at(-1)).toMatchObject({ kept: processed.kept, entropy: processed.entropy });
    expect(done.at(-1)?.["best_prob"]).toBeCloseTo(processed.p(0), 12);
    expect(done.reduce((sum, { cut }) => sum + Number(cut), processed.kept)).toBe(50);
    const stay = done.reduce((share, { cut_mass }) => share * (1 - Number(cut_mass)), 1);
    expect(stay).toBeGreaterThan(0.5);
  }
});

test("penalties and typical-p are stages like the others", () => {
  const row = new Row(Float32Array.from({ length: 50 }, (_, id) => Math.sin(id * id) * 4));
  const stages = activeStages(
    { ...NEUTRAL, typical_p: 0.6, repetition_penalty: 1.5, presence_penalty: 0.5 },
    ORDERS.hf,
  );
  const processed = new Processed(row, stages, { prompt: [1, 2], output: [3, 3] });
  const done = explained({ row, processed, chain: { stages, order: ORDERS.hf, seed: 3 }, counting: "hf" });
  expect(done.map(({ stage }) => stage)).toEqual(["logits", "repetition_penalty", "frequency_penalty", "typical_p"]);
  expect(done[2]?.["settings"]).toBe("CountPenalty(frequency=0.0, presence=0.5, counted='output', last_n=None)");
  expect(done[3]?.["cut"]).toBe(50 - processed.kept);
});

test("mixed colours are written as every SVG reader supports them", () => {
  expect(common("color(srgb 1 0.5 0)")).toBe("rgb(255, 128, 0)");
  expect(common("color(srgb 0.1 1.2 -1e-7 / 0.25)")).toBe("rgba(26, 255, 0, 0.25)");
  expect(common("rgb(1, 2, 3)")).toBe("rgb(1, 2, 3)");
});
