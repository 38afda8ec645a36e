#!/bin/bash
# Checks the installed packages, in a root of their own: manual, completions, units.
set -eux -o pipefail
export LC_ALL=C.UTF-8

for program in gw-gateway gw-agent; do
    $program --version
    getent passwd $program
    test "$(stat --format '%a %U' /var/lib/$program)" = "700 $program"
    test -z "$(dpkg --verify $program)"

    # shellcheck disable=SC2046
    said=$(zcat $(dpkg --listfiles $program | grep '/man1/.*\.1\.gz$') |
        man --warnings=w --local-file - 2>&1 >/dev/null)
    test -z "$said"
    # The command that writes the pages is hidden from them.
    man --local-file "/usr/share/man/man1/$program-doctor.1.gz" | grep -e --json >/dev/null
    test ! -e /usr/share/man/man1/$program-manual.1.gz

    # Each shell finds the completions by itself, and completes "doc".
    bash -c '. /usr/share/bash-completion/bash_completion
        _completion_loader $1 || test $? = 124
        function=$(complete -p $1 | sed "s/.*-F \([^ ]*\).*/\1/")
        COMP_WORDS=($1 doc) COMP_CWORD=1
        $function $1 doc $1
        test "${COMPREPLY[*]}" = doctor' bash $program
    zsh -fc 'autoload -U compinit && compinit -u -D && [[ $_comps[$1] == _$1 ]] && autoload +X -U _$1' zsh $program
    fish -c "complete --do-complete '$program doc'" | grep ^doctor
done

units=(gw-gateway.service gw-gateway.socket gw-gateway-admin.socket gw-agent.service gw-agent-enroll.service)
said=$(systemd-analyze verify --man=yes "${units[@]}" 2>&1)
test -z "$said"
for unit in gw-gateway gw-agent gw-agent-enroll; do
    # Tenths: 0 is safe, 100 is not.
    systemd-analyze security --offline=yes --threshold=20 $unit.service >/dev/null
done
gw-gateway serve --config /etc/gw/gateway.toml --check

# An upgrade to a package with other examples keeps an edited configuration file, and asks nothing. It replaces one that is as
# installed, and the package that is installed then is the first one again.
for program in gw-gateway gw-agent; do
    example=/usr/share/$program/${program#gw-}.toml
    config=/etc/gw/${program#gw-}.toml
    cmp "$example" "$config"
    dpkg-deb --raw-extract /root/${program}_*.deb /root/changed
    sed -i 's/^Version: .*/Version: 99-1/' /root/changed/DEBIAN/control
    echo "# of the new version" >>"/root/changed$example"
    dpkg-deb --build /root/changed /root/changed.deb
    echo "# edited" >>"$config"
    dpkg --install /root/changed.deb </dev/null
    test "$(tail -n 1 "$config")" = "# edited"
    cp "$example" "$config"
    dpkg --install /root/${program}_*.deb </dev/null
    cmp "$example" "$config"
    test "$(grep --count "# of the new version" "$config")" = 0
    test ! -e "$config.unedited"
    rm -r /root/changed /root/changed.deb
done
test "$(stat --format '%a %U' /etc/gw/gateway.toml)" = "644 root"
cmp /usr/share/gw-agent/gw-agent /etc/default/gw-agent
touch /root/passed
