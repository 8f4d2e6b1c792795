CREATE OR REPLACE FUNCTION @schema@.@name@(
    topic text,
    payload json,
    biz_id text DEFAULT NULL,
    key text DEFAULT '',
    headers json DEFAULT NULL,
    priority integer DEFAULT 0,
    delay interval DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL,
    expires_in interval DEFAULT NULL,
    is_unique boolean DEFAULT false,
    strict_order boolean DEFAULT false
) RETURNS uuid LANGUAGE plpgsql SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $publish$
-- publish() of django-exactly-once, version @version@. Installed by the app outbox.contrib.sql; do not edit it here.
#variable_conflict use_variable
DECLARE
    unfit CONSTANT text := E'[\\u0001-\\u001f\\u007f]';
    blank CONSTANT text := E'^[ \\u0085\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]*$';
    longest CONSTANT interval := interval '3650 days';
    -- RFC 9562, section 5.7: milliseconds in the place of the first random bits, and version 7 in the place of 4.
    id CONSTANT uuid := encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
        52, 1), 53, 1), 'hex')::uuid;
    has_key CONSTANT boolean := octet_length(key) > 0;
    kept jsonb := '{}';
    is_float boolean;
    traceparent text := '';
    document text := payload::text;
    body bytea;
    crc bigint := 4294967295;
    of_nibble CONSTANT bigint[] := ARRAY[
        0, 498536548, 997073096, 651767980, 1994146192, 1802195444, 1303535960, 1342533948,
        3988292384, 4027552580, 3604390888, 3412177804, 2607071920, 2262029012, 2685067896, 3183342108];
    hashed CONSTANT bytea := CASE WHEN octet_length(key) > 0 THEN convert_to(key, 'UTF8') ELSE uuid_send(id) END;
    created_at timestamptz;
    due_at timestamptz;
    became text := 'ready';
    earlier uuid;
    earlier_state text;
    what text;
    given text COLLATE "C";
    part record;
    wrong text[];
BEGIN
    FOR what, given IN
        VALUES ('topic', coalesce(topic, '')), ('biz_id', coalesce(biz_id, id::text)), ('key', coalesce(key, '-'))
    LOOP
        wrong := coalesce(wrong, CASE
            WHEN what = 'key' AND given = '' THEN NULL
            WHEN given ~ blank THEN ARRAY[
                format('%s is %L: it must not be blank.', what, given),
                'A topic names what the message is about; biz_id and key may be left out.']
            WHEN given ~ unfit THEN ARRAY[
                format('%s %L cannot be used: it contains a control character.', what, left(given, 80)), 'Use printable text.']
            WHEN octet_length(given) > 255 THEN ARRAY[
                format('%s %L cannot be used: it is %s bytes long.', what, left(given, 80), octet_length(given)),
                'The limit is 255 bytes. Use the id of the thing that the message is about.']
            WHEN what = 'topic' AND string_to_array(given, '.') && ARRAY['*', '#'] THEN ARRAY[
                format('topic %L contains a wildcard of topic exchanges.', left(given, 80)),
                'Choose a topic without the words ''*'' and ''#''.']
        END);
    END LOOP;

    wrong := coalesce(wrong, CASE
        WHEN key IS NULL OR priority IS NULL OR is_unique IS NULL OR strict_order IS NULL THEN ARRAY[
            format('%s is NULL.', concat_ws(', ',
                CASE WHEN key IS NULL THEN 'key' END, CASE WHEN priority IS NULL THEN 'priority' END,
                CASE WHEN is_unique IS NULL THEN 'is_unique' END, CASE WHEN strict_order IS NULL THEN 'strict_order' END)),
            'Leave it out, or pass its default in place of NULL with coalesce().']
        WHEN document IS NULL THEN ARRAY['payload is NULL.', 'For the JSON value null pass ''null''.']
        WHEN priority NOT BETWEEN 0 AND 9 THEN ARRAY[
            format('priority is %s.', priority), 'It must be from 0 to 9.']
        WHEN priority > 0 AND has_key THEN ARRAY[
            format('priority %s and key %L exclude each other.', priority, left(key, 80)),
            'A message that overtakes breaks the order of its key. Drop one of them.']
        WHEN strict_order AND NOT has_key THEN ARRAY[
            'strict_order is true and there is no key.', 'Pass the key whose order it is.']
        WHEN is_unique AND biz_id IS NULL THEN ARRAY[
            'is_unique is true and there is no biz_id.', 'Pass the biz_id of the business fact, or leave out is_unique.']
        WHEN delay IS NOT NULL AND deliver_at IS NOT NULL THEN ARRAY[
            'delay and deliver_at are given.', 'Pass one of them.']
        WHEN delay < interval '0' OR delay > longest THEN ARRAY[
            format('delay is %s.', delay), 'It must be from 0 to 3650 days.']
        WHEN deliver_at <= '1970-01-01 00:00+00' OR deliver_at >= clock_timestamp() + longest THEN ARRAY[
            format('deliver_at is %s.', deliver_at), 'It must lie after 1970 and within the next 3650 days.']
        WHEN expires_in <= interval '0' OR expires_in > longest THEN ARRAY[
            format('expires_in is %s.', expires_in), 'It must be more than 0 and at most 3650 days.']
        WHEN json_typeof(headers) NOT IN ('object', 'null') THEN ARRAY[
            'headers is not a JSON object.', 'Pass names with text, numbers and booleans.']
    END);

    IF wrong IS NULL AND json_typeof(headers) = 'object' THEN
        FOR part IN
            SELECT h.key COLLATE "C" AS name, h.value, json_typeof(h.value) AS kind, h.value #>> '{}' COLLATE "C" AS text
            FROM json_each(headers) AS h
        LOOP
            is_float := part.kind = 'number' AND part.text ~ '[.eE]';
            wrong := coalesce(wrong, CASE
                WHEN part.name = '' OR part.name ~ unfit OR octet_length(part.name) > 255 THEN ARRAY[
                    format('The header name %L cannot be used.', left(part.name, 80)), 'Take a short printable name.']
                WHEN part.name IN ('CC', 'BCC') OR lower(part.name) ~ '^(compression$|cloudevents|x-|ce-)' THEN ARRAY[
                    format('The header %L is reserved.', part.name), 'Choose another name, or the argument that sets it.']
                WHEN CASE part.kind
                    WHEN 'string' THEN part.text ~ unfit OR octet_length(part.text) > 16384
                    WHEN 'number' THEN abs(part.text::numeric) > 1.7976931348623157e308
                        OR NOT is_float AND part.text::numeric NOT BETWEEN -9223372036854775808 AND 9223372036854775807
                    ELSE part.kind <> 'boolean' END
                OR part.name = 'traceparent' AND (part.kind <> 'string' OR octet_length(part.text) > 255) THEN ARRAY[
                    format('The header %L is %s.', part.name, left(part.value::text, 80)),
                    'It must be printable text, a 64-bit whole number, a finite float or a boolean.']
            END);
            EXIT WHEN wrong IS NOT NULL;
            -- jsonb forgets an exponent, and with it that a whole number is a float.
            kept := kept || jsonb_build_object(part.name,
                CASE WHEN is_float THEN to_jsonb(part.text::numeric + 0.0) ELSE part.value::jsonb END);
        END LOOP;
        traceparent := coalesce(kept ->> 'traceparent', '');
        kept := kept - 'traceparent';
        -- Its length as publish() stores it: six characters for each that is not ASCII, twelve outside of the first plane.
        IF length(kept::text) + 5 * length(regexp_replace(kept::text COLLATE "C", '[ -~]', '', 'g'))
            + 6 * length(regexp_replace(kept::text COLLATE "C", E'[\\u0001-\\uffff]', '', 'g')) > 16384
        THEN
            wrong := coalesce(wrong, ARRAY['The headers are longer than 16384 bytes.', 'Put large values into the payload.']);
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', wrong[1] USING ERRCODE = 'invalid_parameter_value', HINT = wrong[2];
    END IF;

    -- Without the spaces between its tokens, as publish() writes it: those outside of quotes. JSON has no character 1 or 2.
    IF document COLLATE "C" ~ E'[ \\t\\n\\r]' THEN
        SELECT string_agg(CASE n % 2 WHEN 1 THEN translate(piece, E' \t\n\r', '') ELSE piece END, '"' ORDER BY n) INTO document
            FROM string_to_table(replace(replace(document, E'\\\\', E'\1'), E'\\"', E'\2'), '"') WITH ORDINALITY AS t(piece, n);
        document := replace(replace(document, E'\2', E'\\"'), E'\1', E'\\\\');
    END IF;
    body := convert_to(document, 'UTF8');
    IF octet_length(body) > @body_limit@ THEN
        RAISE EXCEPTION 'The payload for topic % is % bytes as JSON, and OUTBOX[''BODY_LIMIT_BYTES''] is @body_limit@.',
            topic, octet_length(body)
            USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Store the large part elsewhere and publish a reference to it, or raise the limit and run migrate.';
    END IF;
    IF strpos(document, E'\\u') > 0 THEN
        -- jsonb refuses halves of surrogate pairs, as publish() does, but also \u0000.
        PERFORM regexp_replace(document COLLATE "C", E'(\\\\\\\\)|\\\\u0000', E'\\1', 'g')::jsonb;
    END IF;

    -- CRC-32, four bits at a time.
    FOR at IN 0 .. octet_length(hashed) - 1 LOOP
        crc := crc # get_byte(hashed, at);
        crc := (crc >> 4) # of_nibble[(crc & 15) + 1];
        crc := (crc >> 4) # of_nibble[(crc & 15) + 1];
    END LOOP;
    crc := crc # 4294967295;

    IF strict_order THEN
        -- Before a position is drawn.
        PERFORM pg_advisory_xact_lock(@order_space@, (crc - 2147483648)::int);
    END IF;

    IF is_unique THEN
        LOOP
            INSERT INTO @names@ (topic, biz_id, message_id) VALUES (topic, biz_id, id) ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;
            SELECT n.message_id INTO earlier FROM @names@ AS n
                WHERE n.topic = topic COLLATE "C" AND n.biz_id = biz_id COLLATE "C";
            CONTINUE WHEN NOT FOUND;  -- given up meanwhile
            earlier_state := NULL;
            -- History by day, the newest first, through its parent, on which the caller has rights. The live ones again at the
            -- end, because it may be restored meanwhile.
            FOR part IN
                SELECT '@live@' AS name, 1 AS place, 0 AS first, 1 AS until
                UNION ALL SELECT '@history@', 2, first, lead(first, 1, 2147483647) OVER (ORDER BY first) FROM (
                    SELECT 1 AS first UNION SELECT to_date(right(c.relname, 10), 'YYYY_MM_DD') - date '1970-01-01'
                    FROM pg_catalog.pg_inherits AS i JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
                    WHERE i.inhparent = '@history@'::regclass AND c.relname ~ '_[0-9]{4}_[0-9]{2}_[0-9]{2}$') AS days
                UNION ALL SELECT '@live@', 3, 0, 1
                ORDER BY place, first DESC
            LOOP
                BEGIN
                    EXECUTE format('SELECT m.state FROM %s AS m WHERE m.message_id = $1 AND m.day >= %s AND m.day < %s',
                        part.name, part.first, part.until) INTO earlier_state USING earlier;
                    RAISE EXCEPTION USING ERRCODE = 'OX001';  -- ends the subtransaction, and with it the locks of partitions
                EXCEPTION WHEN SQLSTATE 'OX001' THEN
                    EXIT WHEN earlier_state IS NOT NULL;
                END;
            END LOOP;
            IF earlier_state IS NULL OR earlier_state IN ('expired', 'cancelled', 'rolled_back') THEN
                DELETE FROM @names@ AS n WHERE n.message_id = earlier;
            ELSE
                -- A lock writes to the log, so that the commit waits for the disk: see outbox.store.unique.
                PERFORM FROM @names@ AS n WHERE n.message_id = earlier AND earlier_state = 'published' FOR KEY SHARE;
                RETURN earlier;
            END IF;
        END LOOP;
    END IF;

    -- Not statement_timestamp(), which is when the client's command began: a procedure may have run for hours since.
    created_at := clock_timestamp();
    IF deliver_at IS NOT NULL OR delay > interval '0' THEN
        -- In seconds: an interval of days would depend on the time zone of the session.
        due_at := coalesce(deliver_at, created_at + make_interval(secs => extract(epoch FROM delay)::float8));
        became := 'scheduled';
    END IF;
    INSERT INTO @live@ (
        message_id, topic, biz_id, key, shard, priority, body, headers, correlation_id, causation_id, traceparent, is_unique,
        wire, attempts, last_error, created_at, deliver_at, available_at, expires_at, state, ready_position
    ) VALUES (
        id, topic, coalesce(biz_id, id::text), key, crc % 64, priority, body, kept, id::text, '', traceparent, is_unique,
        NULL, 0, '', created_at, due_at, coalesce(due_at, created_at),
        coalesce(due_at, created_at) + make_interval(secs => extract(epoch FROM expires_in)::float8), became,
        CASE WHEN priority > 0 THEN nextval('@sequence@'::regclass) ELSE 0 END
    );
    IF @is_recorded@ THEN
        INSERT INTO @trail@ (message_id, was, became, at, process, reason) VALUES (
            id, '', became, created_at, format('postgresql:%s:@name@', pg_backend_pid()), '');
    END IF;
    RETURN id;
END
$publish$
