//! Searches return the records that match, and refuse invalid parameters.

use std::collections::BTreeMap;

use super::*;

/// Writes records of three services over two days, in no order and in several flushes, and returns
/// them.
fn many(fixture: &Fixture) -> BTreeMap<RequestId, (&'static str, RequestRecord)> {
    let labels = [LABEL, "acme--other", "globex--api"];
    let client = ClientId::new("gw_ci_00000000000000000000").unwrap();
    let key = KeyId::new("0000000000000000").unwrap();
    let failed = RecordedAttempt {
        agent_id: Some(AgentId::random()),
        reason: "silent",
        duration_us: 7,
    };
    let mut all = BTreeMap::new();
    for number in 0..600_u64 {
        let age_ms = number * number * 331 % DAY_MS;
        let record = RequestRecord {
            target: if number % 3 == 0 {
                "/x/y?/a".into()
            } else {
                "/a/b".into()
            },
            by: match number % 4 {
                0 => Some(CallerId::Client(client.clone())),
                1 => Some(CallerId::ServiceKey(key.clone())),
                2 => Some(CallerId::Admin),
                _ => None,
            },
            status: [Some(200), Some(404), Some(502), Some(503), None][number as usize % 5],
            code: (number % 5 == 3).then_some("GW_AGENT_UNAVAILABLE"),
            timing: Timing {
                total: number * 1000,
                ..Timing::default()
            },
            attempts: if number % 50 == 0 {
                Box::new([failed.clone()])
            } else {
                Box::default()
            },
            ..RequestRecord::example(id(NOON_MS - age_ms, number))
        };
        let label = labels[number as usize % 7 % 3];
        all.insert(record.id, (label, record.clone()));
        fixture.push(label, vec![record]);
        if number % 100 == 0 {
            fixture.log.flush();
        }
    }
    fixture.log.flush();
    all
}

#[test]
fn searches_return_matching_records_newest_first_in_pages() {
    let fixture = Fixture::new();
    let all = many(&fixture);
    let since_ms = 1_795_208_400_500;
    type Takes<'a> = &'a dyn Fn(&str, &RequestRecord) -> bool;
    let cases: [(&str, Takes<'_>); 18] = [
        ("", &|_, _| true),
        ("account=acme", &|label, _| label.starts_with("acme--")),
        ("account=acme&service=api", &|label, _| label == LABEL),
        ("account=acme&service=api&status=502", &|label, r| {
            label == LABEL && r.status == Some(502)
        }),
        ("status=502", &|_, r| r.status == Some(502)),
        ("status=5xx", &|_, r| r.status >= Some(500)),
        ("status=none", &|_, r| r.status.is_none()),
        ("code=GW_AGENT_UNAVAILABLE", &|_, r| r.code.is_some()),
        ("path_prefix=/a", &|_, r| r.target.starts_with("/a")),
        ("caller_id=0000000000000000", &|_, r| {
            matches!(r.by, Some(CallerId::ServiceKey(_)))
        }),
        ("retried=true", &|_, r| !r.attempts.is_empty()),
        ("account=acme&service=api&retried=false", &|label, r| {
            label == LABEL && r.attempts.is_empty()
        }),
        ("min_ms=300", &|_, r| r.timing.total >= 300_000),
        (
            "account=acme&service=api&since=2026-11-20T22:00:00.5%2B01:00",
            &|label, r| label == LABEL && r.id.unix_ms() >= since_ms,
        ),
        ("until=2026-11-20T22:00:00.5%2B01:00", &|_, r| {
            r.id.unix_ms() < since_ms
        }),
        ("account=nobody", &|_, _| false),
        ("account=acme&service=nothing", &|_, _| false),
        ("until=1970-01-01T00:00:00Z", &|_, _| false),
    ];
    for (parameters, takes) in cases {
        // Pages of several sizes, and searches that end early after little work.
        let late_ms = NOON_MS - 2 * 60 * 60 * 1000;
        for (limit, work, from_ms) in [
            (1000, WORK_MAX, 0),
            (7, WORK_MAX, 0),
            (7, 1, late_ms),
            (1000, 40_000, 0),
        ] {
            let matches = all
                .iter()
                .rev()
                .filter(|(id, (label, record))| id.unix_ms() >= from_ms && takes(label, record));
            let expected: Vec<RequestId> = matches.map(|(id, _)| *id).collect();
            let mut query = query(parameters);
            query.limit = Some(limit);
            if from_ms > 0 {
                query.since = Some(block::time_text(from_ms));
            }
            assert_eq!(
                all_pages(&fixture.log, query, work),
                expected,
                "{parameters}"
            );
        }
    }
    for id in all.keys() {
        assert_eq!(fixture.log.show(*id).unwrap().unwrap().id, id.to_string());
    }
}

/// Ids of the requests on all pages of a search.
fn all_pages(log: &RequestLog, mut query: SearchQuery, work: u64) -> Vec<RequestId> {
    let mut found = Vec::new();
    loop {
        let page = log.search_within(&query, work).unwrap();
        assert!(page.items.len() <= query.limit.unwrap());
        found.extend(
            page.items
                .iter()
                .map(|item| item.id.parse::<RequestId>().unwrap()),
        );
        match page.next_cursor {
            Some(cursor) => query.cursor = Some(cursor),
            None => return found,
        }
    }
}

#[test]
fn invalid_searches_name_the_field_and_the_expected_value() {
    let fixture = Fixture::new();
    let too_long = format!("account={}&service={}", "a".repeat(15), "s".repeat(58));
    for (parameters, expected) in [
        (
            "account=A",
            "account: \"A\" is not an account id: 3 to 15 characters",
        ),
        ("service=api", "account: required with `service`"),
        (
            "account=acme&service=-",
            "service: \"-\" is not a service id",
        ),
        (
            too_long.as_str(),
            "service: too long together with the account",
        ),
        (
            "status=6xx",
            "status: must be a status like `502`, a class like `5xx`, or `none`",
        ),
        ("status=99", "status: "),
        (
            "code=gw-x",
            "code: must be an error code like `GW_RATE_LIMITED`",
        ),
        ("path_prefix=a", "path_prefix: must begin with `/`"),
        ("caller_id=me", "caller_id: must be a client id"),
        (
            "since=yesterday",
            "since: must be a time like `2026-11-21T04:15:32Z`",
        ),
        ("until=2026-11-21", "until: must be a time like"),
        ("limit=0", "limit: must be a whole number from 1 to 1000"),
        ("limit=1001", "limit: "),
        (
            "cursor=7",
            "cursor: must be the `next_cursor` of the previous page",
        ),
    ] {
        let error = fixture.log.search(&query(parameters)).unwrap_err();
        assert!(
            matches!(error, LogError::Invalid { .. }) && error.to_string().starts_with(expected),
            "{error}"
        );
    }
}
