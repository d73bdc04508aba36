// The sampler's settings for other programs, to copy.

import type { JSX } from "preact";
import { commandLine, fitsShell } from "../export/quote";
import { fill, useStrings } from "../i18n/strings";
import { commandOptions, PROGRAMS, pythonSampler, translated, type Chain, type Program } from "../sampler/code";
import { Code } from "../ui/prose";

const NAMES: Record<Program, string> = {
  huggingface: "Hugging Face GenerationConfig",
  vllm: "vLLM SamplingParams",
  "llama.cpp": "llama.cpp",
};

interface CopyProps {
  readonly chain: Chain;
  /** The name or path that opens the model. */
  readonly where: string;
  readonly prompt: string;
}

export function CopySampler({ chain, where, prompt }: CopyProps): JSX.Element {
  const { sampler: t, exports } = useStrings();
  const { imports, expression } = pythonSampler(chain);
  const command = commandOptions(chain);
  return (
    <details class="copy-sampler" data-chart="copy">
      <summary>{t.copy}</summary>
      {PROGRAMS.map((program) => {
        const { code, missing, reordered, recounted } = translated(chain, program);
        return (
          <div key={program} data-program={program}>
            <Code title={NAMES[program]} code={code} />
            {missing.length ? (
              <p class="note alarm">
                {fill(t.no_equivalent, { names: missing.map((name) => t.stages[name]).join(", ") })}
              </p>
            ) : null}
            {reordered ? <p class="note">{t.other_order}</p> : null}
            {recounted ? <p class="note alarm">{t.other_counts}</p> : null}
          </div>
        );
      })}
      <div data-program="python">
        <Code title={exports.python} code={["import lmhead", ...imports, "", `sampler = ${expression}`].join("\n")} />
      </div>
      {command && fitsShell(prompt) ? (
        <div data-program="command">
          <Code title={exports.command} code={commandLine("generate", where, prompt, command)} />
        </div>
      ) : (
        <p class="note">{t.no_command}</p>
      )}
    </details>
  );
}
