// A client of the HTTP API in another language, with what Node has built in.
//
//   node client.mjs <base URL> <token> publish <topic> <key>...   publish a message for each idempotency key
//   node client.mjs <base URL> <token> read <subscription>        read all that is due, and do not acknowledge it
//   node client.mjs <base URL> <token> work <subscription> <n>    read and acknowledge until n messages are done

const [base, token, action, ...rest] = process.argv.slice(2)

async function call(path, body, headers = {}) {
  const response = await fetch(base + path, {
    method: 'POST',
    headers: {authorization: `Bearer ${token}`, 'content-type': 'application/json', ...headers},
    body: JSON.stringify(body),
  })
  return {status: response.status, body: await response.json()}
}

const say = what => console.log(JSON.stringify(what))

if (action === 'publish') {
  const [topic, ...keys] = rest
  for (const key of keys) {
    const {status, body} = await call('outbox/messages', {topic, payload: {job: key, price: '9.90'}}, {'idempotency-key': key})
    say({status, biz_id: body.biz_id, created: body.created})
  }
} else if (action === 'read') {
  const {status, body} = await call(`inbox/subscriptions/${rest[0]}/read`, {max_messages: 100, wait: 20, lease: 2})
  say({status, jobs: body.messages.map(message => message.payload.job)})
  setInterval(() => {}, 1000) // until it is killed
} else if (action === 'work') {
  const [name, wanted] = rest
  for (let done = 0; done < Number(wanted); ) {
    const {body} = await call(`inbox/subscriptions/${name}/read`, {max_messages: 10, wait: 20})
    const leases = body.messages.map(message => message.lease)
    if (leases.length === 0) continue
    const {status} = await call(`inbox/subscriptions/${name}/acknowledge`, {leases})
    for (const message of body.messages) say({status, job: message.payload.job, attempt: message.attempt})
    done += leases.length
  }
}
