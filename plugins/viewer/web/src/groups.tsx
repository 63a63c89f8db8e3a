import { useMemo, useState } from "preact/hooks";
import type { Episode, Group } from "./api";
import { difference, type Part } from "./difference";
import { Field, Problem, Status, useLoaded } from "./parts";
import { link, type Place, replaceQuery } from "./router";
import { asText, cut, literal, number, seconds, signed } from "./text";

const PAGE = 25;

export function Groups({ place, revision }: { place: Place; revision: string }) {
  const offset = Number(place.query.get("offset") ?? 0);
  const sort = place.query.get("sort") ?? "order";
  const { value, error } = useLoaded<{ total: number; groups: Group[] }>(`runs/${place.run}/groups`, {
    revision, sort, offset, limit: PAGE, uid: place.query.get("uid") ?? "", step: place.query.get("step") ?? "", validation: place.query.get("validation") ?? "",
  });
  return (
    <section aria-labelledby="heading">
      <h1 id="heading">Groups</h1>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label class="grow">
          Task
          <Field id="search" type="search" placeholder="start of the uid   /" value={place.query.get("uid") ?? ""} onValue={(text) => replaceQuery({ uid: text, offset: undefined })} />
        </label>
        <label>
          Order
          <select value={sort} onChange={(event) => replaceQuery({ sort: event.currentTarget.value, offset: undefined })}>
            <option value="order">as run</option>
            <option value="mean">lowest mean first</option>
            <option value="spread">largest difference first</option>
          </select>
        </label>
        <label>
          Step
          <Field type="number" min="0" class="short" value={place.query.get("step") ?? ""} onValue={(text) => replaceQuery({ step: text, offset: undefined })} />
        </label>
      </form>
      <Problem text={error} />
      {value && (
        <p class="count" role="status">
          {number(value.total)} {value.total === 1 ? "group" : "groups"}
        </p>
      )}
      {value?.groups.map((group) => <GroupView key={`${group.global_step} ${group.validation} ${group.uid}`} group={group} run={place.run} />)}
      {value && value.total > PAGE && (
        <nav class="pages" aria-label="Pages">
          <button disabled={offset === 0} onClick={() => replaceQuery({ offset: Math.max(0, offset - PAGE) || undefined })}>
            ← previous
          </button>
          <span>
            {offset + 1}–{Math.min(offset + PAGE, value.total)} of {number(value.total)}
          </span>
          <button disabled={offset + PAGE >= value.total} onClick={() => replaceQuery({ offset: offset + PAGE })}>
            next →
          </button>
        </nav>
      )}
    </section>
  );
}

function GroupView({ group, run }: { group: Group; run: number }) {
  const [compared, setCompared] = useState(false);
  const scored = group.episodes.filter((each) => each.reward !== null);
  const best = scored.reduce<Group["episodes"][0] | null>((top, each) => (top === null || each.reward! > top.reward! ? each : top), null);
  const worst = scored.reduce<Group["episodes"][0] | null>((low, each) => (low === null || each.reward! < low.reward! ? each : low), null);
  return (
    <section class="group" aria-label={`Group ${group.uid}`}>
      <h2>
        {literal(group.uid)}
        {group.global_step > 0 && <span class="dim"> step {group.global_step}</span>}
        {group.validation && <span class="dim"> held out</span>}
        <span class="dim">
          {" "}
          mean {number(group.mean)} ± {number(group.std)}, best − worst {group.max === null ? "–" : number(group.max - group.min!)}
        </span>
        {group.no_variance && (
          <span class="flag" title="all rewards are equal, so GRPO has no gradient from this group">
            ⚠ no variance
          </span>
        )}
      </h2>
      <ul class="cards">
        {group.episodes.map((each) => (
          <li class={each === best && !group.no_variance ? "best" : each === worst && !group.no_variance ? "worst" : ""}>
            <a href={link(run, "episode", { key: each.key })}>
              <span class="hidden">episode {literal(each.key)}, reward</span>
              <b>{number(each.reward)}</b>
              <span title="reward minus the group's mean">{signed(each.difference)}</span>
              <Status status={each.status} />
              {each.advantage !== null && <span class="advantage">advantage {signed(each.advantage)}</span>}
              <span class="dim">
                {number(each.response_tokens)} tokens · {each.num_tool_calls} {each.num_tool_calls === 1 ? "call" : "calls"} · {seconds(each.total_s)}
              </span>
            </a>
          </li>
        ))}
      </ul>
      {best && worst && best !== worst && (
        <details onToggle={(event) => setCompared(event.currentTarget.open)}>
          <summary>best beside worst</summary>
          {compared && (
            <Comparison run={run} keys={[best.key, worst.key]} />
          )}
        </details>
      )}
    </section>
  );
}

/** The texts of two episodes beside each other; what the other one does not have is marked. */
function Comparison({ run, keys }: { run: number; keys: [string, string] }) {
  const best = useLoaded<Episode>(`runs/${run}/episode`, { key: keys[0] });
  const worst = useLoaded<Episode>(`runs/${run}/episode`, { key: keys[1] });
  const parts = useMemo(() => (best.value && worst.value ? difference(textOf(best.value), textOf(worst.value)) : null), [best.value, worst.value]);
  return (
    <>
      <Problem text={best.error || worst.error} />
      {parts && (
        <div class="columns">
          {[best.value!, worst.value!].map((episode, index) => (
            <article class="path">
              <h3>
                {index ? "worst" : "best"}: <a href={link(run, "episode", { key: episode.key })}>{literal(episode.key)}</a> <span class="dim">reward {number(episode.reward)}</span>
              </h3>
              <Marked parts={parts[index]} />
            </article>
          ))}
        </div>
      )}
    </>
  );
}

function textOf(episode: Episode): string {
  const sampled = episode.records.map((each) => each.response_text);
  const isSampled = sampled.length > 0 && sampled.every((each) => each !== null);
  return isSampled ? sampled.join("\n") : episode.messages.map((each) => `${each.role}: ${asText(each.content)}`).join("\n");
}

const CLIPPED = 20_000;

/** Parts of a text as text, clipped as all long texts; a mark has a line below, so that it is no colour alone. */
function Marked({ parts }: { parts: Part[] }) {
  const [all, setAll] = useState(false);
  const length = parts.reduce((sum, [text]) => sum + text.length, 0);
  let left = all ? Infinity : CLIPPED;
  return (
    <div class="text">
      <bdi>
        {parts.map(([text, isShared]) => {
          const shown = cut(text, Math.max(0, left));
          left -= text.length;
          return isShared || shown === "" ? literal(shown) : <mark>{literal(shown)}</mark>;
        })}
      </bdi>
      {length > CLIPPED && !all && (
        <button class="more" onClick={() => setAll(true)}>
          show all {number(length)} characters
        </button>
      )}
    </div>
  );
}
