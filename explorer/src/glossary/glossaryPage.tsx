// The glossary page: the terms of all pages, in the page's language.

import type { JSX } from "preact";
import { useContext } from "preact/hooks";
import { Language, useStrings } from "../i18n/strings";
import glossary from "../i18n/glossary.json";

export function GlossaryPage(): JSX.Element {
  const { glossary: s } = useStrings();
  const lang = useContext(Language);
  return (
    <section class="glossary" aria-labelledby="glossary-title">
      <header class="intro">
        <h1 id="glossary-title">{s.title}</h1>
        <p class="note">{s.lead}</p>
      </header>
      <dl>
        {glossary.map((entry) => (
          <div key={entry.en} id={entry.en.replaceAll(" ", "-").toLowerCase()}>
            <dt>
              {entry[lang]}
              {lang === "zh" && entry.en !== entry.zh ? <small lang="en"> {entry.en}</small> : null}
            </dt>
            <dd>{entry.definition[lang]}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
