// Actions and memory of every pipeline rank, unpacked.
const KINDS = { F: 'forward', B: 'backward', I: 'input gradients', W: 'weight gradients' };

function unpackActions(step) {
  return step.ranks.map(({ actions }) => {
    const found = [];
    let now = 0;
    for (let at = 0; at < actions.length; ) {
      const [parts, length] = step.shapes[actions[at]], start = now + actions[at + 1];
      at += 2;
      now = start + length;
      for (const [kind, slot] of parts) found.push({ kind, slot, microbatch: actions[at++], start, stop: now });
    }
    return found;
  });
}

function unpackMemory(step) {
  return step.memory.ranks.map(({ start, changes }) => {
    const times = [0], sizes = [start];
    for (let at = 0; at < changes.length; at += 2) {
      const last = times.length - 1, moved = times[last] + changes[at], bytes = sizes[last] + step.memory.steps[changes[at + 1]];
      if (changes[at] === 0) sizes[last] = bytes;
      else times.push(moved), sizes.push(bytes);
    }
    times.push(step.makespan);
    sizes.push(sizes.at(-1));
    return { times, sizes };
  });
}
